// Slots and their tokens: choosing one marks the other.
(() => {
  const tokens = (panel) => (panel ? [...panel.querySelectorAll(".t")] : []);

  function choose(inside, slot, at) {
    const slots = JSON.parse(inside.dataset.slots);
    if (!slots.length) return;
    slot = Math.max(0, Math.min(slots.length - 1, slot));
    const shown = tokens(inside);
    for (const token of inside.querySelectorAll(".t.on")) token.classList.remove("on");
    const strongest = Math.max(...slots[slot].map(([, weight]) => weight));
    for (const [place, weight] of slots[slot]) {
      shown[place].classList.add("on");
      shown[place].style.setProperty("--s", (0.25 + (0.6 * weight) / strongest).toFixed(2));
    }
    inside.querySelector(".cc-slot").value = slot + 1;
    const [best, weight] = slots[slot].reduce((a, b) => (b[1] > a[1] ? b : a));
    const number = slots[slot].length;
    const word = shown[best] ? shown[best].textContent.trim() : "";
    const least = Math.min(...slots[slot].map(([, share]) => share));
    const share = weight > 1.05 * least && word ? `, most of “${word}” (${Math.round(100 * weight)} %)` : "";
    inside.querySelector(".cc-readout").textContent =
      `Slot ${slot + 1} of ${slots.length}: ${number} token${number > 1 ? "s" : ""}${share}.`;
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
    const place = tokens(inside).indexOf(token);
    const weights = JSON.parse(inside.dataset.slots).map((slot) => (slot.find(([at]) => at === place) || [0, 0])[1]);
    const highest = Math.max(...weights);
    if (highest > 0) choose(inside, weights.indexOf(highest), token);
  });
})();
