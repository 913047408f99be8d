#include "src/store/xml.h"

#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "src/base/status_macros.h"

namespace weft::store {
namespace {

constexpr int kMaxDepth = 16;

absl::Status Malformed(const char* what) {
  return absl::InvalidArgumentError(std::string("not XML: ") + what);
}

void AppendUtf8(uint32_t code, std::string* out) {
  const auto byte = [&](uint32_t bits) {
    out->push_back(static_cast<char>(bits));
  };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      byte(0xE0 | code >> 12);
    } else {
      byte(0xF0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3F));
    }
    byte(0x80 | (code >> 6 & 0x3F));
  }
  byte(0x80 | (code & 0x3F));
}

// Appends the character that the entity names, without its '&' and ';'.
bool AppendEntity(std::string_view name, std::string* out) {
  constexpr std::pair<std::string_view, char> kNamed[] = {
      {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
  for (const auto& [known, character] : kNamed) {
    if (name == known) {
      out->push_back(character);
      return true;
    }
  }
  if (!name.starts_with('#')) return false;
  name.remove_prefix(1);
  const int base = name.starts_with('x') ? 16 : 10;
  if (base == 16) name.remove_prefix(1);
  uint32_t code = 0;
  const auto [end, error] =
      std::from_chars(name.data(), name.data() + name.size(), code, base);
  if (error != std::errc() || end != name.data() + name.size() || code == 0 ||
      code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
    return false;
  }
  AppendUtf8(code, out);
  return true;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  absl::StatusOr<XmlElement> Document() {
    WEFT_RETURN_IF_ERROR(SkipProlog());
    if (!Take("<")) return Malformed("there is no element");
    WEFT_ASSIGN_OR_RETURN(XmlElement root, Element(0));
    WEFT_RETURN_IF_ERROR(SkipProlog());
    if (!rest_.empty()) return Malformed("text after the root element");
    return root;
  }

 private:
  bool Take(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  // Returns the text up to `end`, and goes on behind it.
  std::optional<std::string_view> TakeUntil(std::string_view end) {
    const size_t at = rest_.find(end);
    if (at == std::string_view::npos) return std::nullopt;
    const std::string_view before = rest_.substr(0, at);
    rest_.remove_prefix(at + end.size());
    return before;
  }

  // Skips what may surround the root element.
  absl::Status SkipProlog() {
    Take("\xEF\xBB\xBF");
    while (true) {
      while (!rest_.empty() && absl::ascii_isspace(rest_.front())) {
        rest_.remove_prefix(1);
      }
      if (Take("<?")) {
        if (!TakeUntil("?>")) return Malformed("a declaration has no end");
      } else if (Take("<!--")) {
        if (!TakeUntil("-->")) return Malformed("a comment has no end");
      } else {
        return absl::OkStatus();
      }
    }
  }

  // Reads the rest of a tag, and returns its name. Attributes may hold '>'.
  absl::StatusOr<std::string> Tag(bool* empty) {
    const size_t size = rest_.find_first_of(" \t\r\n/>");
    if (size == std::string_view::npos || size == 0 || rest_[0] == '!') {
      return Malformed("a tag has no name");
    }
    std::string_view name = rest_.substr(0, size);
    name.remove_prefix(name.find(':') + 1);  // npos + 1 is 0.
    rest_.remove_prefix(size);
    char quote = 0;
    for (size_t i = 0; i < rest_.size(); ++i) {
      const char c = rest_[i];
      if (quote != 0) {
        if (c == quote) quote = 0;
      } else if (c == '"' || c == '\'') {
        quote = c;
      } else if (c == '>') {
        *empty = i > 0 && rest_[i - 1] == '/';
        rest_.remove_prefix(i + 1);
        return std::string(name);
      }
    }
    return Malformed("a tag has no end");
  }

  // Reads an element, whose '<' is read.
  absl::StatusOr<XmlElement> Element(int depth) {
    if (depth == kMaxDepth) return Malformed("elements are nested too deeply");
    XmlElement element;
    bool empty = false;
    WEFT_ASSIGN_OR_RETURN(element.name, Tag(&empty));
    while (!empty) {
      WEFT_RETURN_IF_ERROR(Text(&element.text));
      if (Take("/")) {
        WEFT_ASSIGN_OR_RETURN(const std::string name, Tag(&empty));
        if (name != element.name)
          return Malformed("an end tag of another name");
        break;
      }
      WEFT_ASSIGN_OR_RETURN(XmlElement child, Element(depth + 1));
      element.children.push_back(std::move(child));
    }
    return element;
  }

  // Reads text up to the '<' of a tag, and that.
  absl::Status Text(std::string* out) {
    while (true) {
      const size_t size = rest_.find_first_of("<&");
      if (size == std::string_view::npos)
        return Malformed("an element is open");
      out->append(rest_.substr(0, size));
      rest_.remove_prefix(size);
      if (Take("&")) {
        const auto name = TakeUntil(";");
        if (!name || !AppendEntity(*name, out)) {
          return Malformed("an unknown entity");
        }
      } else if (Take("<![CDATA[")) {
        const auto text = TakeUntil("]]>");
        if (!text) return Malformed("CDATA has no end");
        out->append(*text);
      } else if (Take("<!--")) {
        if (!TakeUntil("-->")) return Malformed("a comment has no end");
      } else {
        Take("<");
        return absl::OkStatus();
      }
    }
  }

  std::string_view rest_;
};

}  // namespace

const XmlElement* XmlElement::Find(std::string_view child) const {
  for (const XmlElement& element : children) {
    if (element.name == child) return &element;
  }
  return nullptr;
}

std::string XmlElement::TextOf(std::string_view child) const {
  const XmlElement* found = Find(child);
  return found == nullptr ? "" : found->text;
}

absl::StatusOr<XmlElement> ParseXml(std::string_view text) {
  return Parser(text).Document();
}

std::string EscapeXml(std::string_view text) {
  return absl::StrReplaceAll(absl::string_view(text.data(), text.size()),
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

}  // namespace weft::store
