// The filter of a page. Without it everything is shown. With it, items that do not match are hidden.
// The page's address has the search, as in #find=hybrid&state=failed&feature=HSDP, so that it can be passed on.
"use strict";
const bar = document.querySelector(".filter");
if (bar) {
  const fields = [...bar.querySelectorAll("[name]")];
  const items = [...document.querySelectorAll("[data-item]")];
  const heads = items.map((item) => item.closest("[data-holder]")?.dataset.holder ?? ""); // the file of a test
  const texts = items.map((item, index) => `${heads[index]} ${item.textContent}`.toLowerCase());
  const holders = [...document.querySelectorAll("[data-holder]")];
  const opened = holders.map((holder) => holder.open);
  const shown = bar.querySelector("output");
  const things = bar.dataset.things;

  function fits(item, text, { find, ...query }) {
    if (!find.toLowerCase().split(/\s+/).every((word) => text.includes(word))) return false;
    return Object.entries(query).every(([name, value]) => !value || (item.dataset[name] ?? "").split("|").includes(value));
  }

  function apply() {
    const query = Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
    const active = Object.values(query).some(Boolean);
    let tests = 0, fitting = 0;
    items.forEach((item, index) => {
      item.hidden = active && !fits(item, texts[index], query);
      if (item.dataset.item !== "test") return;
      tests += 1;
      fitting += !item.hidden;
    });
    holders.forEach((holder, index) => {
      const some = holder.querySelector("[data-item]:not([hidden])") !== null;
      holder.hidden = active && !some;
      if (holder.tagName === "DETAILS") holder.open = active ? some && fitting <= 500 : opened[index];
    });
    shown.textContent = active ? `${fitting} of ${tests} ${things}` : `${tests} ${things}`;
    bar.querySelector("button").hidden = !active;
    return query;
  }

  function keep() {
    const query = Object.entries(apply()).filter(([, value]) => value);
    const address = location.pathname + location.search;
    try {
      history.replaceState(null, "", query.length ? `#${new URLSearchParams(query)}` : address);
    } catch {
      // A page inside another one, as CI servers show it, has no address of its own.
    }
  }

  function read() {
    if (location.hash && !location.hash.includes("=")) {
      const target = document.getElementById(location.hash.slice(1)); // a heading of the page, or something folded
      if (target?.tagName === "DETAILS") target.open = true;
      return;
    }
    const query = new URLSearchParams(location.hash.slice(1));
    for (const field of fields) field.value = query.get(field.name) || "";
    apply();
    if (location.hash) document.getElementById("tests")?.scrollIntoView();
  }

  let waiting = 0;
  bar.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(keep, 120);
  });
  bar.querySelector("button").addEventListener("click", () => {
    for (const field of fields) field.value = "";
    keep();
  });
  window.addEventListener("hashchange", read);
  for (const words of document.querySelectorAll("[data-filter-link]")) {
    const link = document.createElement("a");
    link.href = `#${words.dataset.filterLink}`;
    link.append(...words.childNodes);
    words.append(link);
  }
  bar.hidden = false;
  apply();
  read();
}
