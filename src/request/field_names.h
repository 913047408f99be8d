// The names of fields in error messages. They are those of weft.v1, except for
// a client of another API, whose requests have other names for them.
#ifndef WEFT_SRC_REQUEST_FIELD_NAMES_H_
#define WEFT_SRC_REQUEST_FIELD_NAMES_H_

#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft {

// A field of weft.v1, such as "data.targets", and the client's name for it,
// such as "data[].loss_fn_inputs.target_tokens". Each "[]" of `shown` takes an
// index of the path, in their order.
struct FieldName {
  absl::string_view path;
  absl::string_view shown;
};

// Returns the field's name in this thread's innermost FieldNameScope; `path`
// itself outside any scope, and for a field without a row. Of two rows, the
// longer path counts. A row also names the fields inside its field, so that
// "adamw" names "adamw.beta1".
std::string NameOfField(absl::string_view path);

// Sets the names for this thread until the scope is destroyed. Scopes nest.
class FieldNameScope {
 public:
  // REQUIRES: `names` outlive the scope.
  explicit FieldNameScope(absl::Span<const FieldName> names);
  ~FieldNameScope();
  FieldNameScope(const FieldNameScope&) = delete;
  FieldNameScope& operator=(const FieldNameScope&) = delete;

 private:
  const absl::Span<const FieldName> outer_;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_FIELD_NAMES_H_
