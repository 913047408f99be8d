// Fuzzes the answers of an object store. No input may crash, and an element's
// text is the same once it is written and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "src/store/xml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weft::store::ParseXml;
  const auto root =
      ParseXml(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!root.ok()) return 0;
  const auto again =
      ParseXml("<t>" + weft::store::EscapeXml(root->text) + "</t>");
  if (!again.ok() || again->text != root->text) std::abort();
  return 0;
}
