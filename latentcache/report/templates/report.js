"use strict";
(() => {
  const find = (selector, root = document) => root.querySelector(selector);
  const every = (selector, root = document) => [...root.querySelectorAll(selector)];

  const root = document.documentElement;
  find("#theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });

  const sheet = find("#sheet");
  if (!sheet) return;
  const cards = every(".card", sheet);
  const search = find("#search"), filter = find("#filter"), sort = find("#sort");
  const copy = find("#copy"), count = find("#count"), lightbox = find("#lightbox");

  // Captions and names are only ever read as text.
  const texts = new Map(cards.map(card => [card, find(".about", card).textContent.toLowerCase()]));
  const shown = () => every(".card", sheet).filter(card => !card.hidden);

  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const card of cards) {
      const isWanted = !filter.value || (filter.value === "marked" ? card.dataset.marked !== "0" : card.dataset.bucket === filter.value);
      card.hidden = !isWanted || !words.every(word => texts.get(card).includes(word));
    }
    const key = sort.value;
    const compare = {
      order: (a, b) => a.dataset.order - b.dataset.order,
      name: (a, b) => a.dataset.name.localeCompare(b.dataset.name),
    }[key] || ((a, b) => b.dataset[key] - a.dataset[key] || a.dataset.order - b.dataset.order);
    sheet.append(...[...cards].sort(compare));
    count.textContent = `${shown().length} of ${cards.length}`;
  }
  search.addEventListener("input", update);
  filter.addEventListener("change", update);
  sort.addEventListener("change", update);

  const picked = () => every(".card", sheet).filter(card => find(".pick input", card).checked);
  sheet.addEventListener("change", () => {
    copy.disabled = !picked().length;
    copy.textContent = picked().length ? `Copy ${picked().length} names` : "Copy names";
  });
  copy.addEventListener("click", async () => {
    const names = picked().map(card => card.dataset.name).join("\n");
    try {
      await navigator.clipboard.writeText(names);
    } catch {
      const area = document.createElement("textarea");  // pages from a file may lack the clipboard
      area.value = names;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    copy.textContent = "Copied";
  });

  let current = null;
  function enlarge(card) {
    if (!card) return;
    current = card;
    find(".stage", lightbox).replaceChildren(...every(".images > span", card).map(part => part.cloneNode(true)));
    find(".words", lightbox).replaceChildren(...every(".about > :not(.pick)", card).map(part => part.cloneNode(true)));
    const title = document.createElement("b");
    title.textContent = card.dataset.name;
    find(".words", lightbox).prepend(title);
    if (!lightbox.open) lightbox.showModal();
  }
  const beside = step => {
    const some = shown();
    enlarge(some[(some.indexOf(current) + step + some.length) % some.length]);
  };
  sheet.addEventListener("click", event => {
    const button = event.target.closest(".images");
    if (button) enlarge(button.closest(".card"));
  });
  find("#previous").addEventListener("click", () => beside(-1));
  find("#next").addEventListener("click", () => beside(1));
  lightbox.addEventListener("keydown", event => {
    if (event.key === "ArrowLeft") beside(-1);
    if (event.key === "ArrowRight") beside(1);
  });
  lightbox.addEventListener("click", event => { if (event.target === lightbox) lightbox.close(); });
  lightbox.addEventListener("close", () => { if (current) find(".images", current).focus(); });
  update();
})();
