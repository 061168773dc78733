// The saved picture of a dashboard is not shown beside its live view.

// Hides the saved picture of this dashboard as long as a live one is on the page (see saved_picture.py).
export function hidePicture(token) {
  const rule = element("style", { "data-ddp-lab": token }, `.ddp-lab-static-${token} { display: none !important; }`);
  document.head.append(rule);
  document.body.classList.add(`ddp-lab-live-${token}`);
  return () => {
    rule.remove();
    if (!document.querySelector(`style[data-ddp-lab="${token}"]`)) document.body.classList.remove(`ddp-lab-live-${token}`);
  };
}
