// The field above a table hides what does not contain the typed text.
addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector(".filter");
  field?.addEventListener("input", () => {
    const typed = field.value.trim().toLowerCase();
    const fits = (each) => each.textContent.toLowerCase().includes(typed);
    const list = document.querySelectorAll("article section p:has(code + code)");
    for (const row of document.querySelectorAll("article tbody tr")) row.hidden = !fits(row);
    for (const names of list) {
      for (const name of names.querySelectorAll("code")) name.hidden = !fits(name);
      for (const part of names.childNodes) if (part.nodeType === 3) part.nodeValue = typed ? " " : ", ";
    }
  });
});
// Screen readers tell the two sidebars apart by these names; the search page has no heading of its own.
addEventListener("DOMContentLoaded", () => {
  if (!document.querySelector("h1")) document.querySelector("article").insertAdjacentHTML("afterbegin", "<h1>Search</h1>");
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
});
// What scrolls sideways can be reached with the keyboard.
addEventListener("load", () => {
  for (const box of document.querySelectorAll("article pre, article .table-wrapper"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
// On phones, a formula that is wider than its box is broken at its wide gaps; if it is still too wide, it becomes smaller.
addEventListener("load", async () => {
  if (!window.MathJax?.startup?.promise) return;
  await MathJax.startup.promise;
  const share = (box) => box.clientWidth / box.scrollWidth;
  for (const box of document.querySelectorAll("article div.math")) {
    if (share(box) >= 1) continue;
    const parts = MathJax.startup.document.getMathItemsWithin(box)[0].math.split(/\\q?quad\b/);
    const whole = (part) => part.split("{").length === part.split("}").length && !/\\begin|\\end/.test(part);
    if (parts.length > 1 && parts.every(whole)) {
      MathJax.typesetClear([box]);
      box.textContent = `\\[\\begin{gathered}${parts.join("\\\\")}\\end{gathered}\\]`;
      await MathJax.typesetPromise([box]);
    }
    if (share(box) < 1) box.style.fontSize = `${Math.max(55, Math.floor(95 * share(box)))}%`;
  }
});
