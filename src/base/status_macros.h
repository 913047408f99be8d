// Early returns for absl::Status and absl::StatusOr.
//
//   WEFT_RETURN_IF_ERROR(Validate(request));
//   WEFT_ASSIGN_OR_RETURN(const Config config, ReadConfig(path));
#ifndef WEFT_SRC_BASE_STATUS_MACROS_H_
#define WEFT_SRC_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define WEFT_RETURN_IF_ERROR(expr)                              \
  do {                                                          \
    if (absl::Status weft_status = (expr); !weft_status.ok()) { \
      return weft_status;                                       \
    }                                                           \
  } while (false)

#define WEFT_STATUS_CONCAT_INNER_(a, b) a##b
#define WEFT_STATUS_CONCAT_(a, b) WEFT_STATUS_CONCAT_INNER_(a, b)

#define WEFT_ASSIGN_OR_RETURN(lhs, expr)                                      \
  WEFT_ASSIGN_OR_RETURN_IMPL_(WEFT_STATUS_CONCAT_(weft_status_or_, __LINE__), \
                              lhs, expr)

#define WEFT_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                \
  if (!result.ok()) return result.status();            \
  lhs = std::move(result).value()

#endif  // WEFT_SRC_BASE_STATUS_MACROS_H_
