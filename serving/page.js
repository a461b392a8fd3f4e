// Slots and their tokens: choosing one marks the other, in both panels.
(() => {
  const tokens = (panel) => (panel ? [...panel.querySelectorAll(".t")] : []);

  function choose(inside, slot, at) {
    const slots = JSON.parse(inside.dataset.slots);
    if (!slots.length) return;
    slot = Math.max(0, Math.min(slots.length - 1, slot));
    const opening = Number(inside.dataset.opening);
    const left = tokens(inside.querySelector('[data-panel="slots"]'));
    const right = inside.dataset.linked === "1" ? tokens(inside.querySelector('[data-panel="errors"]')) : [];
    for (const token of inside.querySelectorAll(".t.on")) token.classList.remove("on");
    const strongest = Math.max(...slots[slot].map(([, weight]) => weight));
    for (const [place, weight] of slots[slot]) {
      for (const token of [left[place], right[place - opening]]) {
        if (!token) continue;
        token.classList.add("on");
        token.style.setProperty("--s", (0.25 + (0.6 * weight) / strongest).toFixed(2));
      }
    }
    inside.querySelector(".cc-slot").value = slot + 1;
    const [best, weight] = slots[slot].reduce((a, b) => (b[1] > a[1] ? b : a));
    const number = slots[slot].length;
    const word = left[best] ? left[best].textContent.trim() : "";
    const least = Math.min(...slots[slot].map(([, share]) => share));
    const share = weight > 1.05 * least && word ? `, most of “${word}” (${Math.round(100 * weight)} %)` : "";
    const chance = at && at.dataset.p ? ` “${at.textContent.trim()}” comes back with ${at.dataset.p}.` : "";
    inside.querySelector(".cc-readout").textContent =
      `Slot ${slot + 1} of ${slots.length}: ${number} token${number > 1 ? "s" : ""}${share}.${chance}`;
    for (const panel of inside.querySelectorAll(".cc-tokens")) {
      const first = panel.querySelector(".t.on");
      if (!first || panel.contains(at)) continue;
      const top = first.offsetTop - panel.offsetTop;
      // Not `scrollIntoView`, which would move the page, too.
      if (top < panel.scrollTop || top > panel.scrollTop + panel.clientHeight - 40) panel.scrollTop = top - 60;
    }
  }

  document.addEventListener("input", (event) => {
    if (!event.target.matches || !event.target.matches(".cc-slot")) return;
    choose(event.target.closest(".cc-inside"), Number(event.target.value) - 1, null);
  });

  document.addEventListener("click", (event) => {
    const asks = event.target.closest && event.target.closest("#cc-ask");
    // On a phone the answers stand below the window.
    if (asks && window.innerWidth < 760) document.querySelector("#cc-answers").scrollIntoView({ behavior: "smooth" });
    const token = event.target.closest && event.target.closest(".cc-inside .t");
    if (!token) return;
    const inside = token.closest(".cc-inside");
    const isError = token.closest(".cc-panel").dataset.panel === "errors";
    if (isError && inside.dataset.linked !== "1") return;
    const place = tokens(token.closest(".cc-panel")).indexOf(token) + (isError ? Number(inside.dataset.opening) : 0);
    const weights = JSON.parse(inside.dataset.slots).map((slot) => (slot.find(([at]) => at === place) || [0, 0])[1]);
    const highest = Math.max(...weights);
    if (highest > 0) choose(inside, weights.indexOf(highest), token);
  });
})();
