// Puts in place what the monitor sends, and keeps "… ago" going. The page is complete without it.
"use strict";
(() => {
  const shown = {};
  let skew = Number(document.body.dataset.now) * 1000 - Date.now();
  const live = document.getElementById("live");

  const duration = (seconds) => {
    const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    let left = Math.max(Math.round(seconds), 0);
    const first = units.findIndex(([, length]) => left >= length);
    if (first < 0) return "0 s";
    const said = [];
    for (const [unit, length] of units.slice(first, first + 2)) {
      const count = Math.floor(left / length);
      left -= count * length;
      if (count) said.push(`${count} ${unit}`);
    }
    return said.join(" ");
  };

  const tick = () => {
    const now = Date.now() + skew;
    for (const time of document.querySelectorAll("time[data-age]")) {
      time.textContent = duration((now - Date.parse(time.dateTime)) / 1000) + " ago";
    }
  };

  // What is sent was escaped by the monitor, and the policy lets no script in it work.
  const place = (id, html) => {
    const element = document.getElementById(id);
    if (!element || shown[id] === html) return;
    shown[id] = html;
    const open = [...element.querySelectorAll("details[open]")].map((d) => d.dataset.key);
    element.innerHTML = html;
    for (const details of element.querySelectorAll("details")) {
      details.open = open.includes(details.dataset.key);
    }
  };

  const say = (text, state) => {
    live.textContent = text;
    live.className = "quiet " + state;
  };

  const listen = () => {
    const source = new EventSource("events");
    source.onmessage = (event) => {
      const { now, title, parts } = JSON.parse(event.data);
      skew = now * 1000 - Date.now();
      document.title = title;
      for (const [id, html] of Object.entries(parts)) place(id, html);
      say("live", "on");
      tick();
    };
    source.onerror = () => {
      say("not connected, trying again", "off");
      // A browser tries again after a broken connection, never after an answer such as 503.
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
    };
  };

  listen();
  setInterval(tick, 1000);
})();
