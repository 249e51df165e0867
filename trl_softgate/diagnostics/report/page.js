"use strict";
(() => {
  const THEMES = {
    light: { card: "#ffffff", ink: "#3e4c59", line: "#e4e7eb" },
    dark: { card: "#1b2127", ink: "#b8c2cc", line: "#323b45" },
  };
  const root = document.documentElement;
  const { frames, told } = JSON.parse(document.getElementById("report-data").textContent);
  const models = () => Bokeh.documents.flatMap((doc) => [...doc.all_models]);

  // A canvas takes no colors from the style sheet, so the figures are told.
  function paint(theme) {
    const { card, ink, line } = THEMES[theme];
    for (const model of models()) {
      if (model.type === "Figure") {
        model.setv({ background_fill_color: card, border_fill_color: card, outline_line_color: line });
      } else if (model.type.endsWith("Axis")) {
        model.setv({
          axis_label_text_color: ink,
          major_label_text_color: ink,
          axis_line_color: line,
          major_tick_line_color: line,
        });
      } else if (model.type === "Grid" && model.grid_line_color !== null) {
        model.grid_line_color = line;
      } else if (model.type === "Legend") {
        model.setv({ label_text_color: ink, background_fill_color: card, inactive_fill_color: card });
      }
    }
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "light" : "dark";
    paint(theme);
  }

  function toggleRun(button) {
    const visible = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(visible));
    for (const model of models()) {
      if (model.tags.includes(`run:${button.dataset.run}`)) {
        model.visible = visible;
      }
    }
  }

  // Each run shows its newest histogram that is not after the step of the slider.
  function showStep(slider) {
    const { steps, series } = frames[slider.dataset.chart];
    const step = steps[slider.valueAsNumber];
    slider.nextElementSibling.textContent = step.toLocaleString("en-US");
    for (const model of models()) {
      const own = series[model.name];
      if (own !== undefined) {
        const at = Math.max(0, own.steps.findLastIndex((candidate) => candidate <= step));
        model.data = { ...model.data, share: own.shares[at] };
      }
    }
  }

  function nearest(x, step) {
    let low = 0;
    let high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      [low, high] = x[middle] <= step ? [middle, high] : [low, middle];
    }
    return step - x[low] <= x[high] - step ? low : high;
  }

  // Under every figure over steps, what its curves are worth at the step that the pointer is at in one of them.
  function tell(step) {
    for (const line of document.querySelectorAll(".readout")) {
      line.replaceChildren();
      if (step === null) {
        continue;
      }
      const title = line.appendChild(document.createElement("b"));
      title.textContent = `step ${Math.round(step).toLocaleString("en-US")}`;
      for (const id of told[line.dataset.chart]) {
        const curve = Bokeh.documents[0].get_model_by_id(id);
        const { x, y } = curve.data_source.data;
        if (curve.visible && step >= x[0] - 0.5 && step <= x[x.length - 1] + 0.5) {
          const entry = line.appendChild(document.createElement("span"));
          const color = curve.glyph.line_color;
          entry.appendChild(document.createElement("i")).style.background = color.value ?? color;
          entry.append(`${curve.name} `);
          const number = entry.appendChild(document.createElement("b"));
          number.textContent = String(Number(y[nearest(x, step)].toPrecision(4)));
        }
      }
    }
  }

  function listen() {
    let waiting = false;
    let latest = null;
    const on = (step) => {
      latest = step;
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(() => {
          waiting = false;
          tell(latest);
        });
      }
    };
    for (const key of Object.keys(told)) {
      const plot = Bokeh.documents[0].get_model_by_name(`figure:${key}`);
      // Set as a whole: Bokeh takes no notice of a callback that is added to a figure already drawn.
      plot.js_event_callbacks = { mousemove: [(event) => on(event.x)], mouseleave: [() => on(null)] };
    }
  }

  function start() {
    if (Bokeh.documents.length === 0 && document.querySelector("figure.card") !== null) {
      requestAnimationFrame(start);
      return;
    }
    setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.getElementById("theme").addEventListener("click", () => {
      setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    });
    listen();
    for (const button of document.querySelectorAll(".toggle-run")) {
      button.addEventListener("click", () => toggleRun(button));
    }
    for (const slider of document.querySelectorAll(".slider input")) {
      slider.addEventListener("input", () => showStep(slider));
    }
  }
  start();
})();
