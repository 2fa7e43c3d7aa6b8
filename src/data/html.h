// HTML to plain text: what a reader sees, in reading order.
//
// Tags are stripped by block rules: paragraphs, headings, lists and tables stand between blank lines; items, rows,
// divisions and <br> begin a new line; white space collapses, except in <pre>, which is kept as it is. Scripts, styles,
// navigation and the head are dropped; character references are decoded. One pass, linear in the input, no tree: every
// input gives some text, however broken its tags are.
#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

std::string html_to_text(std::string_view html);

}  // namespace tessera::data
