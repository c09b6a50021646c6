// The colours of the page: those of the system, or the ones that were chosen. A classic script, loaded after the styles
// and before the first paint: the dark rules of the styles are switched on or off as a whole.
{
  const THEMES = ["system", "light", "dark"];
  const DARK = "(prefers-color-scheme: dark)";
  const rules = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules])
    .filter(rule => rule instanceof CSSMediaRule && rule.media.mediaText.includes(DARK))
    .map(rule => [rule, rule.media.mediaText]);
  let chosen = "system";
  // A browser may forbid pages to remember anything.
  try { if (THEMES.includes(localStorage.theme)) chosen = localStorage.theme; } catch {}

  const apply = () => {
    for (const [rule, text] of rules)
      rule.media.mediaText = chosen === "system" ? text : chosen === "light" ? "not all" : text.replace(`screen and ${DARK}`, "screen").replace(DARK, "all");
    document.querySelector("meta[name=color-scheme]").content = chosen === "system" ? "light dark" : chosen;
  };
  const label = button => {
    button.textContent = { system: "Auto", light: "Light", dark: "Dark" }[chosen];
    button.title = button.ariaLabel = `Colours: ${chosen === "system" ? "as the system" : chosen}. Change them (t)`;
  };
  apply();

  window.theme = {
    /** Makes a button change the colours. */
    attach(button) {
      label(button);
      button.addEventListener("click", () => {
        chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
        try { localStorage.theme = chosen; } catch {}
        apply();
        label(button);
        dispatchEvent(new Event("theme"));
      });
    },
    /** Calls `draw` after the colours have changed. */
    watch(draw) {
      addEventListener("theme", draw);
      matchMedia(DARK).addEventListener("change", draw);
    },
  };
}
