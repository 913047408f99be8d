#include "src/store/s3_store.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "src/base/status_macros.h"
#include "src/base/threads/at_once.h"
#include "src/store/xml.h"

namespace weft::store {
namespace {

constexpr uint64_t kMaxListBytes = 4 << 20;
// One connection to a store is slower than the network, so large objects travel
// in parts, several at once.
constexpr size_t kRangeBytes = 8 << 20;
constexpr size_t kPartsAtOnce = 8;
constexpr size_t kMaxListed = 1000;  // The API has no larger pages.
constexpr char kIfAbsent[] = "if-none-match: *";

// Returns an ETag without its quotes.
std::string Unquote(absl::string_view etag) {
  absl::ConsumePrefix(&etag, "\"");
  absl::ConsumeSuffix(&etag, "\"");
  return std::string(etag);
}

// The caller's limit does not hold for an answer that is an error.
uint64_t AnswerBytes(uint64_t wanted) {
  return std::max<uint64_t>(wanted, 64 << 10);
}

absl::Status Missing(const std::string& name) {
  return absl::NotFoundError(name + ": no such object");
}

absl::Status Exists(const std::string& name) {
  return absl::AlreadyExistsError(name + ": the object exists");
}

std::string IfMatch(const std::string& etag) {
  return absl::StrCat("if-match: \"", etag, "\"");
}

// Returns the pieces of the bytes from `offset` on, at most `size` bytes.
std::vector<std::string_view> Slice(const std::vector<std::string_view>& pieces,
                                    uint64_t offset, uint64_t size) {
  std::vector<std::string_view> slice;
  for (std::string_view piece : pieces) {
    if (offset >= piece.size()) {
      offset -= piece.size();
      continue;
    }
    piece = piece.substr(offset, size);
    offset = 0;
    size -= piece.size();
    if (!piece.empty()) slice.push_back(piece);
  }
  return slice;
}

// Returns the size in "bytes 0-9/100".
absl::StatusOr<uint64_t> SizeInRange(const S3Answer& answer) {
  const std::string range = answer.http.Header("content-range");
  uint64_t size = 0;
  if (!absl::SimpleAtoi(range.substr(range.find('/') + 1), &size)) {
    return absl::InternalError(
        absl::StrCat("content-range is \"", range, "\""));
  }
  return size;
}

}  // namespace

absl::StatusOr<std::string> S3Store::Create(
    const std::string& key, const std::vector<std::string_view>& pieces) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  if (TotalBytes(pieces) > client_.options().part_bytes) {
    return CreateInParts(key, pieces);
  }
  const S3Request request = {.operation = StoreOperation::kCreate,
                             .method = "PUT",
                             .key = key,
                             .headers = {kIfAbsent},
                             .body = pieces};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.http.status == 412) return Exists(NameOf(key));
  if (!answer.ok()) return client_.Unexpected(request, answer);
  return Unquote(answer.http.Header("etag"));
}

absl::StatusOr<std::string> S3Store::Swap(const std::string& key,
                                          std::string_view bytes,
                                          const std::string& etag) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  const S3Request request = {.operation = StoreOperation::kSwap,
                             .method = "PUT",
                             .key = key,
                             .headers = {IfMatch(etag)},
                             .body = {bytes}};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.http.status == 412 || answer.http.status == 404) {
    return OtherEtag(NameOf(key), etag);
  }
  if (!answer.ok()) return client_.Unexpected(request, answer);
  return Unquote(answer.http.Header("etag"));
}

absl::StatusOr<Object> S3Store::Get(const std::string& key,
                                    uint64_t max_bytes) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  const S3Request request = {.operation = StoreOperation::kGet,
                             .method = "GET",
                             .key = key,
                             .max_answer_bytes = AnswerBytes(max_bytes)};
  absl::StatusOr<S3Answer> answer = client_.Send(request);
  if (!answer.ok()) return answer.status();
  if (answer->http.status == 404) return Missing(NameOf(key));
  if (!answer->ok()) return client_.Unexpected(request, *answer);
  if (answer->http.body.size() > max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        NameOf(key), ": ", answer->http.body.size(), " bytes > ", max_bytes));
  }
  return Object{.bytes = std::move(answer->http.body),
                .etag = Unquote(answer->http.Header("etag"))};
}

absl::StatusOr<uint64_t> S3Store::SizeOf(const std::string& key) {
  const S3Request request = {
      .operation = StoreOperation::kGet, .method = "HEAD", .key = key};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.http.status == 404) return Missing(NameOf(key));
  uint64_t size = 0;
  if (!answer.ok() ||
      !absl::SimpleAtoi(answer.http.Header("content-length"), &size)) {
    return client_.Unexpected(request, answer);
  }
  return size;
}

absl::StatusOr<size_t> S3Store::GetRange(const std::string& key,
                                         uint64_t offset, std::span<char> bytes,
                                         uint64_t* size) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  if (bytes.empty()) {
    WEFT_ASSIGN_OR_RETURN(*size, SizeOf(key));
    return 0;
  }
  const size_t num_parts = (bytes.size() + kRangeBytes - 1) / kRangeBytes;
  std::vector<Range> parts(num_parts);
  WEFT_RETURN_IF_ERROR(RunAtOnce(num_parts, kPartsAtOnce, [&](size_t i) {
    const size_t first = i * kRangeBytes;
    const size_t count = std::min(kRangeBytes, bytes.size() - first);
    absl::StatusOr<Range> part =
        GetPart(key, offset + first, bytes.subspan(first, count),
                std::min(num_parts, kPartsAtOnce));
    if (part.ok()) parts[i] = *part;
    return part.status();
  }));
  *size = parts.front().object_size;
  const size_t wanted =
      std::min<uint64_t>(bytes.size(), *size - std::min(*size, offset));
  size_t read = 0;
  for (const Range& part : parts) read += part.read;
  if (read != wanted) {
    return absl::InternalError(absl::StrCat(
        NameOf(key), ": ", read, " bytes came of a range of ", wanted));
  }
  return read;
}

absl::StatusOr<S3Store::Range> S3Store::GetPart(const std::string& key,
                                                uint64_t offset,
                                                std::span<char> bytes,
                                                size_t at_once) {
  const S3Request request = {
      .operation = StoreOperation::kGet,
      .method = "GET",
      .key = key,
      .headers = {absl::StrCat("range: bytes=", offset, "-",
                               offset + bytes.size() - 1)},
      .max_answer_bytes = AnswerBytes(bytes.size()),
      .at_once = at_once};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.http.status == 404) return Missing(NameOf(key));
  if (answer.http.status == 416) {  // The object ends before.
    WEFT_ASSIGN_OR_RETURN(const uint64_t size, SizeOf(key));
    return Range{.object_size = size};
  }
  if (answer.http.status != 206 || answer.http.body.size() > bytes.size()) {
    return client_.Unexpected(request, answer);
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, SizeInRange(answer));
  std::ranges::copy(answer.http.body, bytes.begin());
  return Range{.read = answer.http.body.size(), .object_size = size};
}

absl::StatusOr<std::vector<ListedObject>> S3Store::List(
    const std::string& prefix, const std::string& after, size_t max_objects) {
  const std::string& root = client_.options().prefix;
  std::vector<ListedObject> found;
  std::string token;
  while (found.size() < max_objects) {
    S3Request request = {.operation = StoreOperation::kList,
                         .method = "GET",
                         .max_answer_bytes = kMaxListBytes};
    if (!token.empty()) request.query.emplace_back("continuation-token", token);
    request.query.emplace_back("list-type", "2");
    request.query.emplace_back(
        "max-keys",
        absl::StrCat(std::min(kMaxListed, max_objects - found.size())));
    request.query.emplace_back("prefix", root + prefix);
    if (!after.empty()) request.query.emplace_back("start-after", root + after);
    WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
    const absl::StatusOr<XmlElement> page = ParseXml(answer.http.body);
    if (!answer.ok() || !page.ok() || page->name != "ListBucketResult") {
      return client_.Unexpected(request, answer);
    }
    for (const XmlElement& item : page->children) {
      if (item.name != "Contents") continue;
      ListedObject object = {.key = item.TextOf("Key"),
                             .etag = Unquote(item.TextOf("ETag"))};
      if (!absl::StartsWith(object.key, root) ||
          !absl::SimpleAtoi(item.TextOf("Size"), &object.size)) {
        return client_.Unexpected(request, answer);
      }
      object.key.erase(0, root.size());
      // Consoles make an empty object for a folder.
      if (!object.key.empty()) found.push_back(std::move(object));
    }
    token = page->TextOf("NextContinuationToken");
    if (page->TextOf("IsTruncated") != "true" || token.empty()) break;
  }
  std::sort(found.begin(), found.end(),
            [](const ListedObject& a, const ListedObject& b) {
              return a.key < b.key;
            });
  return found;
}

absl::Status S3Store::Delete(const std::string& key) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  const S3Request request = {
      .operation = StoreOperation::kDelete, .method = "DELETE", .key = key};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.ok() || answer.http.status == 404) return absl::OkStatus();
  return client_.Unexpected(request, answer);
}

absl::Status S3Store::DeleteIf(const std::string& key,
                               const std::string& etag) {
  WEFT_RETURN_IF_ERROR(CheckKey(key));
  const S3Request request = {.operation = StoreOperation::kDelete,
                             .method = "DELETE",
                             .key = key,
                             .headers = {IfMatch(etag)}};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.ok() || answer.http.status == 404) return absl::OkStatus();
  if (answer.http.status == 501) return Delete(key);  // No such condition.
  if (answer.http.status != 412) return client_.Unexpected(request, answer);
  // At some stores a missing object has another ETag.
  const absl::Status there = SizeOf(key).status();
  if (absl::IsNotFound(there)) return absl::OkStatus();
  return there.ok() ? OtherEtag(NameOf(key), etag) : there;
}

absl::StatusOr<std::string> S3Store::CreateInParts(
    const std::string& key, const std::vector<std::string_view>& pieces) {
  const S3Request begin = {.operation = StoreOperation::kUpload,
                           .method = "POST",
                           .key = key,
                           .query = {{"uploads", ""}}};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(begin));
  const absl::StatusOr<XmlElement> xml = ParseXml(answer.http.body);
  const std::string upload = xml.ok() ? xml->TextOf("UploadId") : "";
  if (!answer.ok() || upload.empty()) return client_.Unexpected(begin, answer);
  absl::StatusOr<std::string> etag = UploadParts(key, upload, pieces);
  if (!etag.ok()) {
    // The store keeps the parts, and bills them, until they are dropped. If
    // this fails, too, the first error says more.
    client_
        .Send({.operation = StoreOperation::kUpload,
               .method = "DELETE",
               .key = key,
               .query = {{"uploadId", upload}}})
        .IgnoreError();
  }
  return etag;
}

absl::StatusOr<std::string> S3Store::UploadParts(
    const std::string& key, const std::string& upload,
    const std::vector<std::string_view>& pieces) {
  const uint64_t part_bytes = client_.options().part_bytes;
  const uint64_t total = TotalBytes(pieces);
  std::vector<std::string> etags((total + part_bytes - 1) / part_bytes);
  WEFT_RETURN_IF_ERROR(RunAtOnce(etags.size(), kPartsAtOnce, [&](size_t i) {
    const S3Request part = {
        .operation = StoreOperation::kUpload,
        .method = "PUT",
        .key = key,
        .query = {{"partNumber", absl::StrCat(i + 1)}, {"uploadId", upload}},
        .body = Slice(pieces, i * part_bytes, part_bytes),
        .at_once = std::min(etags.size(), kPartsAtOnce)};
    WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(part));
    if (!answer.ok()) return client_.Unexpected(part, answer);
    etags[i] = answer.http.Header("etag");
    return absl::OkStatus();
  }));
  return Complete(key, upload, etags);
}

absl::StatusOr<std::string> S3Store::Complete(
    const std::string& key, const std::string& upload,
    const std::vector<std::string>& etags) {
  std::string list = "<CompleteMultipartUpload>";
  for (size_t i = 0; i < etags.size(); ++i) {
    absl::StrAppend(&list, "<Part><PartNumber>", i + 1, "</PartNumber><ETag>",
                    EscapeXml(etags[i]), "</ETag></Part>");
  }
  list += "</CompleteMultipartUpload>";
  const S3Request request = {.operation = StoreOperation::kCreate,
                             .method = "POST",
                             .key = key,
                             .query = {{"uploadId", upload}},
                             .headers = {kIfAbsent},
                             .body = {list}};
  WEFT_ASSIGN_OR_RETURN(const S3Answer answer, client_.Send(request));
  if (answer.http.status == 412) return Exists(NameOf(key));
  if (answer.http.status == 404) {
    // There is no such upload. An earlier attempt may have ended it.
    const absl::Status size = SizeOf(key).status();
    if (size.ok()) return Exists(NameOf(key));
    if (!absl::IsNotFound(size)) return size;
    return absl::UnavailableError(NameOf(key) + ": the upload is lost");
  }
  const absl::StatusOr<XmlElement> xml = ParseXml(answer.http.body);
  if (!answer.ok() || !xml.ok() ||
      xml->name != "CompleteMultipartUploadResult") {
    return client_.Unexpected(request, answer);
  }
  return Unquote(xml->TextOf("ETag"));
}

}  // namespace weft::store
