// Fuzzes the body of a Tinker request. No input may crash or grow beyond its
// limit, and every accepted body can be printed. The first byte says whether
// the body is compressed.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "server/tinker/wire/body.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr size_t kMaxBytes = size_t{1} << 20;
  std::string body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const char* const encoding = data[0] == 'z' ? "zstd" : "";
  if (!weft::server::tinker::Decode(encoding, kMaxBytes, &body).ok()) return 0;
  if (data[0] == 'z' && body.size() > kMaxBytes) std::abort();
  const auto parsed = weft::server::tinker::ParseObject(body);
  if (!parsed.ok()) return 0;
  if (!parsed->is_object()) std::abort();
  (void)parsed->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return 0;
}
