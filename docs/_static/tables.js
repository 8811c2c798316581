// SPDX-License-Identifier: Apache-2.0
// Gives each cell the head of its column, which phones show beside it. The first column of
// a row needs none: it says what the row is about.
"use strict";

addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const heads = [...table.querySelectorAll("thead th")].map(th => th.innerText.trim());
    table.classList.toggle("many-columns", heads.length > 5);
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (column > 0 && heads.length > 2 && heads[column] && cell.innerText.trim()) {
          cell.dataset.head = heads[column];
        }
      });
    }
  }
});
