// Before the first paint: a page that is dark by choice must not flash white. The rest is in theme.js.
{
  const chosen = localStorage.getItem("agrpo.theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
