document.addEventListener("DOMContentLoaded", () => {
  // The switch keeps the place in the page and is remembered by the root page.
  for (const link of document.querySelectorAll(".language-switch a")) {
    link.addEventListener("click", () => {
      link.search = location.search;
      link.hash = location.hash;
      try { localStorage.setItem("language", link.dataset.language); } catch {}
    });
  }
  // What scrolls can be reached by keyboard.
  for (const box of document.querySelectorAll("pre, .table-wrapper, .math-wrapper")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
});
