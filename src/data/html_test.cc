#include "data/html.h"

#include <gtest/gtest.h>

#include "data/html_entities.h"

namespace tessera::data {
namespace {

TEST(Html, BlocksAndWhiteSpace) {
  EXPECT_EQ(html_to_text("<p>one\n  two</p><p>three"), "one two\n\nthree\n");
  EXPECT_EQ(html_to_text("a<br>b<br/><br>c"), "a\nb\n\nc\n");
  EXPECT_EQ(html_to_text("<ul><li>x</li><li> y </li></ul>z"), "x\ny\n\nz\n");
  EXPECT_EQ(html_to_text("<table><tr><td>1</td><td>2</td></tr><tr><td>3</td></tr></table>"), "1 2\n3\n");
  EXPECT_EQ(html_to_text("<div><div><b>bold</b>, <i>it</i>alic</div></div>end"), "bold, italic\nend\n");
  EXPECT_EQ(html_to_text("<H1>Title</H1>text"), "Title\n\ntext\n");
  EXPECT_EQ(html_to_text(""), "");
  EXPECT_EQ(html_to_text(" \n <p> </p> "), "");
}

TEST(Html, DropsWhatIsNotText) {
  EXPECT_EQ(html_to_text("<head><title>t</title><style>p{}</style></head><body>x"), "x\n");
  EXPECT_EQ(html_to_text("<head><title>no end of head<body>x"), "x\n");
  EXPECT_EQ(html_to_text("a<script>if (1 < 2) document.write('</p>');</SCRIPT >b"), "ab\n");
  EXPECT_EQ(html_to_text("a<nav>x<nav>y</nav>z</nav>b"), "a\nb\n");
  EXPECT_EQ(html_to_text("a<!-- <p>no -- > --><!DOCTYPE html><?php x ?>b"), "ab\n");
  EXPECT_EQ(html_to_text("<header>h</header>"), "h\n");  // not <head>
  EXPECT_EQ(html_to_text("<svg/>kept"), "kept\n");
  EXPECT_EQ(html_to_text("<div class=\"x\" role=\"navigation\"><div>up</div>next</div>text"), "text\n");
  EXPECT_EQ(html_to_text("<h1>Title<a class=\"headerlink\" href=\"#t\">\xC2\xB6</a></h1>text"), "Title\n\ntext\n");
}

TEST(Html, PreIsVerbatim) {
  EXPECT_EQ(html_to_text("x<pre>\n  a\n\n   <b>b</b>  c\n</pre>y  z"), "x\n\n  a\n\n   b  c\n\ny z\n");
  EXPECT_EQ(html_to_text("<pre>\r\na\r\n b</pre>"), "a\n b\n");
  EXPECT_EQ(html_to_text("<pre>if a &lt; b:\n\tx &amp;= 1</pre>"), "if a < b:\n\tx &= 1\n");
}

TEST(Html, CharacterReferences) {
  EXPECT_EQ(html_to_text("&lt;p&gt; &amp;amp; &quot;&apos;"), "<p> &amp; \"'\n");
  EXPECT_EQ(html_to_text("caf&eacute; &Eacute; &#233;&#xE9;&#XE9;"), "caf\xC3\xA9 \xC3\x89 \xC3\xA9\xC3\xA9\xC3\xA9\n");
  EXPECT_EQ(html_to_text("&#150;&#x1F600;"), "\xE2\x80\x93\xF0\x9F\x98\x80\n");  // Windows-1252 dash; emoji
  EXPECT_EQ(html_to_text("&#0;&#xD800;&#99999999999;"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\n");
  EXPECT_EQ(html_to_text("a & b &unknown; &#; &#x; &#12a; &"), "a & b &unknown; &#; &#x; &#12a; &\n");
  EXPECT_EQ(html_entity("Aacute"), 0xC1u);
  EXPECT_EQ(html_entity("zwnj"), 0x200Cu);
  EXPECT_EQ(html_entity("aacutes"), 0u);
  EXPECT_EQ(html_entity(""), 0u);
}

TEST(Html, BrokenMarkup) {
  EXPECT_EQ(html_to_text("1 < 2 and 3 <4"), "1 < 2 and 3 <4\n");
  EXPECT_EQ(html_to_text("<a href=\"x>y\" title='<b>'>link</a>"), "link\n");
  EXPECT_EQ(html_to_text("<a title=it's>link</a>"), "link\n");
  EXPECT_EQ(html_to_text("x<p"), "x\n");
  EXPECT_EQ(html_to_text("x<a href=\"never closed>y"), "x\n");
  EXPECT_EQ(html_to_text("x<!-- never closed"), "x\n");
  EXPECT_EQ(html_to_text("x<script>never closed"), "x\n");
  EXPECT_EQ(html_to_text("x</p></pre></nav>y<"), "x\n\ny<\n");
}

}  // namespace
}  // namespace tessera::data
