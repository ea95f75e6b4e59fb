// Shows openapi.json with Swagger UI. Addresses are relative: a prefix put in front by a proxy is
// kept.

const KEY = "trtllm-lite.api-key"; // in sessionStorage, shared with the playground of this tab
const THEME = "trtllm-lite.theme"; // in localStorage, chosen on the playground
const at = (id) => document.getElementById(id);

/** Dark where the playground was told so, or else where the system is. */
function paint(dark) {
  const chosen = localStorage.getItem(THEME);
  const isDark = chosen === "dark" || (chosen !== "light" && dark);
  document.documentElement.classList.toggle("dark-mode", isDark);
}

/** The document. Without a key that the server knows there is none. */
async function load(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("openapi.json", { headers });
  const body = await response.json();
  if (response.ok) return body;
  throw Object.assign(new Error(body.error.message), { status: response.status });
}

function tell(text) {
  at("notice").textContent = text;
  at("notice").hidden = text === "";
}

function show(spec, key) {
  const ui = window.SwaggerUIBundle({
    spec,
    dom_id: "#swagger-ui",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    validatorUrl: null,
    onComplete: () => {
      if (key) ui.preauthorizeApiKey("bearer", key);
    },
  });
}

async function open(key) {
  tell("");
  try {
    const spec = await load(key);
    at("ask").hidden = true;
    if (key) sessionStorage.setItem(KEY, key);
    show(spec, key);
  } catch (error) {
    at("ask").hidden = error.status !== 401;
    tell(key || error.status !== 401 ? error.message : "This server asks for an API key.");
    if (error.status === 401) at("key").focus();
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  open(at("key").value.trim());
});
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => paint(dark.matches));
paint(dark.matches);
open(sessionStorage.getItem(KEY) ?? "");
