// Puts the page together.

import { Announcer, Notice } from "./announce.js";
import { Chat } from "./chat.js";
import { at } from "./dom.js";
import { FormBox } from "./formbox.js";
import { Server } from "./server.js";

/** On a narrow screen the settings fold away; on a wide one they are always open. */
function foldSettings() {
  const wide = matchMedia("(min-width: 60rem)");
  const fold = () => {
    at("settings").open = wide.matches;
  };
  wide.addEventListener("change", fold);
  fold();
}

foldSettings();
new FormBox();
const notice = new Notice(at("notice"));
new Chat(new Server(notice), notice, new Announcer(at("live")));
at("prompt").focus();
