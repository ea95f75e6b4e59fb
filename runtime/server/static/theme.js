// Light, dark, or as the system is. A classic script: it runs before the page is painted, which
// would flash in the wrong colours else.
(() => {
  const KEY = "trtllm-lite.theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const root = document.documentElement;

  const stored = () => {
    const name = localStorage.getItem(KEY);
    return NEXT[name] ? name : "auto";
  };
  const apply = (name) => {
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${name}`;
  };

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(stored());
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem(KEY, NEXT[root.dataset.theme]);
      apply(stored());
    });
  });
})();
