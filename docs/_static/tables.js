// SPDX-License-Identifier: Apache-2.0
// Gives each cell the head of its column, which phones show beside it. The first column of
// a row needs none: it says what the row is about. Short code is not broken, in prose
// neither; other code in tables is broken after a dot, a comma or the like.
"use strict";

function addBreaks(code) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const pieces = text.data.split(/(?<=[.,(=])(?!\))/).flatMap(
      (piece, k) => k ? [document.createElement("wbr"), piece] : [piece]);
    text.replaceWith(...pieces);
  }
}

addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("article code")) {
    code.classList.toggle("short", /^\S{1,24}$/.test(code.innerText));
  }
  for (const table of document.querySelectorAll("table.docutils")) {
    const heads = [...table.querySelectorAll("thead th")].map(th => th.innerText.trim());
    table.classList.toggle("many-columns", heads.length > 5);
    for (const code of table.querySelectorAll("code:not(.short)")) {
      if (/^\S{1,30}$/.test(code.innerText)) code.classList.add("short");
      else addBreaks(code);
    }
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (column > 0 && heads.length > 2 && heads[column] && cell.innerText.trim()) {
          cell.dataset.head = heads[column];
        }
      });
    }
  }
});
