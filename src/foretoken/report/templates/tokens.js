// Arrow keys move from token to token, so that a text is one stop of the tab key. The selected step is highlighted.
(function () {
  var tip = document.getElementById("tip"), lit = [];
  function show(event) {
    var at = event.target.closest ? event.target.closest("[data-tip]") : null;
    lit.forEach(function (each) { each.classList.remove("lit"); });
    lit = at ? Array.from(at.closest("section").querySelectorAll('[data-step="' + at.dataset.step + '"]')) : [];
    lit.forEach(function (each) { each.classList.add("lit"); });
    tip.textContent = at ? at.dataset.tip : "";
  }
  ["mouseover", "focusin", "click"].forEach(function (name) { document.addEventListener(name, show); });
  document.addEventListener("keydown", function (event) {
    var at = document.activeElement, all, to;
    if (!at || !at.classList.contains("token")) { return; }
    all = Array.from(at.closest(".text").querySelectorAll(".token"));
    to = { ArrowRight: all.indexOf(at) + 1, ArrowLeft: all.indexOf(at) - 1, Home: 0, End: all.length - 1 }[event.key];
    if (all[to]) { event.preventDefault(); at.tabIndex = -1; all[to].tabIndex = 0; all[to].focus(); }
  });
})();
