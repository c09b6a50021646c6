// What the model of a run makes of an image from outside.

import { bar, figure, h } from "./dom.js";
import { address } from "./net.js";

export function classify(panel, run) {
  const input = h("input", { type: "file", accept: "image/*,.tif,.tiff,.heic,.npy", class: "hidden", tabindex: -1, "aria-label": "Image file", onchange: () => input.files[0] && ask(input.files[0]) });
  const zone = h("button", { class: "drop", onclick: () => input.click() }, h("b", {}, "Drop an image here"), h("span", { class: "quiet" }, "or click to choose a file, or paste one"));
  const place = h("div", { class: "asked", "aria-live": "polite" });
  let url = "";
  panel.replaceChildren(zone, input, place);

  async function ask(file) {
    URL.revokeObjectURL(url);
    url = URL.createObjectURL(file);
    const image = h("img", { src: url, alt: file.name || "the image" }), result = h("div", {}, h("p", { class: "quiet" }, "The model answers … the first image takes some seconds."));
    image.addEventListener("error", () => image.replaceWith(h("p", { class: "quiet" }, "The browser cannot show this kind of file.")));
    place.replaceChildren(h("div", { class: "view" }, image), result);
    const began = performance.now();
    let content;
    try {
      const response = await fetch(address("classify", { run }), { method: "POST", body: file });
      content = await response.json();
    } catch {
      content = { error: "The board does not answer: is `flatout board` still running?" };
    }
    if (content.error) { result.replaceChildren(h("p", { class: "stopped" }, content.error)); return; }
    const seconds = `${((performance.now() - began) / 1000).toFixed(2)} s`;
    const parts = "value" in content ? [h("p", { class: "big" }, figure(content.value))]
      : [h("p", { class: "big name" }, content.unknown ? "unknown" : content.predictions[0]?.class ?? "none"),
        content.unknown ? h("p", {}, "The image is unlike those that the model was trained on. Its guesses:") : "",
        h("ul", { class: "bars" }, content.predictions.map(({ class: name, probability }, i) => bar(name, probability, probability.toFixed(3), i ? "other" : "")))];
    result.replaceChildren(...parts, h("p", { class: "quiet" }, `${file.name || "pasted image"} · ${seconds}`));
  }

  const isFile = event => [...(event.dataTransfer?.types || [])].includes("Files");
  const over = event => { if (isFile(event)) { event.preventDefault(); zone.classList.add("over"); } };
  const leave = () => zone.classList.remove("over");
  const drop = event => { if (!isFile(event)) return; event.preventDefault(); leave(); if (event.dataTransfer.files[0]) ask(event.dataTransfer.files[0]); };
  const paste = event => { const file = event.clipboardData?.files?.[0]; if (file) ask(file); };
  addEventListener("dragover", over);
  addEventListener("dragleave", leave);
  addEventListener("drop", drop);
  addEventListener("paste", paste);
  return () => {
    URL.revokeObjectURL(url);
    removeEventListener("dragover", over);
    removeEventListener("dragleave", leave);
    removeEventListener("drop", drop);
    removeEventListener("paste", paste);
  };
}
