// Reads the small XML documents with which stores answer.
#ifndef WEFT_SRC_STORE_XML_H_
#define WEFT_SRC_STORE_XML_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace weft::store {

struct XmlElement {
  std::string name;  // Without the prefix of a namespace.
  std::string text;  // All text directly in the element.
  std::vector<XmlElement> children;

  // Returns the first child of this name; null if there is none.
  const XmlElement* Find(std::string_view child) const;
  // Returns the text of the first child of this name, or "".
  std::string TextOf(std::string_view child) const;
};

// Returns the root element. Decodes entities and CDATA, and skips attributes,
// comments and the declaration. Errors: INVALID_ARGUMENT for all else, and for
// a document type or elements that are nested deeply. Threads: any.
absl::StatusOr<XmlElement> ParseXml(std::string_view text);

// Returns `text` as the text of an element.
std::string EscapeXml(std::string_view text);

}  // namespace weft::store

#endif  // WEFT_SRC_STORE_XML_H_
