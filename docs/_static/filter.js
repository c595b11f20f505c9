// The field above a list of model types or a table hides what does not contain the typed text.
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
