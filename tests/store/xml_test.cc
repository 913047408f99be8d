#include "src/store/xml.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace weft::store {
namespace {

TEST(XmlTest, ElementsTextAndEntitiesAreRead) {
  const auto root = ParseXml(
      "\xEF\xBB\xBF<?xml version=\"1.0\"?>\n<!-- a > b -->\n"
      "<s3:List xmlns:s3=\"http://x/>\" a='\"'>\n"
      "<Key>a&amp;b&lt;&gt;&quot;&apos;&#34;&#x1F600;&#xe9;</Key>"
      "<Key>second</Key><Empty/><None ></None >"
      "<Text>x<!-- no --><![CDATA[<&>]]>y</Text></s3:List>\n");
  ASSERT_THAT(root, IsOk());
  EXPECT_EQ(root->name, "List");
  EXPECT_EQ(root->children.size(), 5u);
  EXPECT_EQ(root->TextOf("Key"), "a&b<>\"'\"\xF0\x9F\x98\x80\xC3\xA9");
  EXPECT_EQ(root->TextOf("Text"), "x<&>y");
  EXPECT_EQ(root->TextOf("Empty"), "");
  EXPECT_EQ(root->TextOf("Missing"), "");
  EXPECT_EQ(root->Find("Missing"), nullptr);
}

TEST(XmlTest, WhatIsNoDocumentIsRefused) {
  std::string deep, closed;
  for (int i = 0; i < 20; ++i) {
    deep += "<a>";
    closed += "</a>";
  }
  for (const std::string& text : {std::string(""),
                                  std::string("text"),
                                  std::string("<"),
                                  std::string("<a"),
                                  std::string("<a>"),
                                  std::string("<a></b>"),
                                  std::string("<a><b></a></b>"),
                                  std::string("<a/><b/>"),
                                  std::string("<a>&nbsp;</a>"),
                                  std::string("<a>&#0;</a>"),
                                  std::string("<a>&#xD800;</a>"),
                                  std::string("<a>&#x110000;</a>"),
                                  std::string("<a>&#99999999999;</a>"),
                                  std::string("<a>&amp</a>"),
                                  std::string("<a><![CDATA[</a>"),
                                  std::string("<a><!-- </a>"),
                                  std::string("<?xml"),
                                  std::string("<!DOCTYPE a><a/>"),
                                  std::string("<a b=\"</a>"),
                                  std::string("< a></ a>"),
                                  deep + closed}) {
    EXPECT_THAT(ParseXml(text),
                IsStatus(absl::StatusCode::kInvalidArgument, "not XML"))
        << text;
  }
}

TEST(XmlTest, AnEscapedTextIsReadAsItWas) {
  const std::string text = "a<b>&amp;\"c'";
  EXPECT_EQ(ParseXml("<t>" + EscapeXml(text) + "</t>")->text, text);
}

}  // namespace
}  // namespace weft::store
