"use strict";
(() => {
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const pressed = (button, yes) => button.setAttribute("aria-pressed", String(yes));

  // Without this script the page shows everything at its usual number of bins; the controls appear only with it.
  for (const button of all("[data-toggle]")) {
    button.addEventListener("click", () => {
      const show = button.getAttribute("aria-pressed") === "false";
      pressed(button, show);
      for (const part of all(`[data-arm="${button.dataset.toggle}"]`)) part.classList.toggle("off", !show);
    });
  }

  for (const button of all("[data-choose]")) {
    button.addEventListener("click", () => {
      for (const other of all("[data-choose]")) pressed(other, other === button);
      for (const part of all("[data-bins]")) part.hidden = part.dataset.bins !== button.dataset.choose;
    });
  }

  const download = document.getElementById("download");
  download.addEventListener("click", () => {
    const text = document.getElementById("data").textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "result.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  download.hidden = false;
  const toolbar = document.getElementById("toolbar");
  toolbar.hidden = toolbar.children.length === 0;
})();
