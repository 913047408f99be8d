#include "tests/server/wire/message_edit.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace weft::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// A field of a message, or an entry of a list.
class Place {
 public:
  Place(Message* message, absl::string_view path) : message_(message) {
    const std::vector<absl::string_view> parts = absl::StrSplit(path, '.');
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) message_ = Inner();
      const std::vector<std::string> halves =
          absl::StrSplit(parts[i], absl::ByAnyChar("[]"));
      field_ = message_->GetDescriptor()->FindFieldByName(halves[0]);
      index_ = -1;
      if (halves.size() > 1) {
        EXPECT_TRUE(absl::SimpleAtoi(halves[1], &index_));
      }
    }
  }

  void Clear() { fields().ClearField(message_, field_); }
  void Pop() { fields().RemoveLast(message_, field_); }

  void Set(absl::string_view value) {
    if (index_ < 0) Clear();
    Add(value);
    if (index_ < 0) return;
    const int last = fields().FieldSize(*message_, field_) - 1;
    fields().SwapElements(message_, field_, index_, last);
    Pop();
  }

  void Add(absl::string_view value) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(value, absl::MaxSplits(" * ", 1));
    int count = 1;
    if (!parts.second.empty()) {
      EXPECT_TRUE(absl::SimpleAtoi(parts.second, &count));
    }
    const std::string text = absl::StrCat(field_->name(), ": ", parts.first);
    std::string repeated;
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(text, message_))
          << text;
      if (count == 1 || field_->is_repeated()) continue;
      repeated += fields().GetString(*message_, field_);
      fields().SetString(message_, field_, repeated);
    }
  }

 private:
  const Reflection& fields() const { return *message_->GetReflection(); }
  Message* Inner() const {
    return index_ < 0
               ? fields().MutableMessage(message_, field_)
               : fields().MutableRepeatedMessage(message_, field_, index_);
  }

  Message* message_;
  const FieldDescriptor* field_ = nullptr;
  int index_ = -1;
};

}  // namespace

void Edit(Message* message, absl::string_view changes) {
  for (const absl::string_view change :
       absl::StrSplit(changes, "; ", absl::SkipEmpty())) {
    const std::vector<std::string> words =
        absl::StrSplit(change, absl::MaxSplits(' ', 2));
    if (words[0] == "clear") {
      Place(message, words[1]).Clear();
    } else if (words[0] == "pop") {
      Place(message, words[1]).Pop();
    } else if (words[1] == "=") {
      Place(message, words[0]).Set(words[2]);
    } else {
      Place(message, words[0]).Add(words[2]);
    }
  }
}

}  // namespace weft::server
