// Readers of the request fields that several AdapterService calls share.
#ifndef WEFT_SERVER_WIRE_ADAPTER_FIELDS_H_
#define WEFT_SERVER_WIRE_ADAPTER_FIELDS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/wire/field_checks.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"

namespace weft::server {

template <typename Message>
absl::StatusOr<std::string> ReadAdapterId(const Message& request,
                                          const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  return request.adapter_id();
}

// Returns the request's tenant. Returns an empty string if the request names no
// tenant; Caller::Qualify later sets the tenant.
template <typename Message>
absl::StatusOr<std::string> ReadTenant(absl::string_view field,
                                       const Message& request) {
  if (request.tenant().empty()) return std::string();
  WEFT_RETURN_IF_ERROR(CheckName(field, request.tenant()));
  return request.tenant();
}

template <typename Message>
absl::StatusOr<Durability> ReadDurability(absl::string_view field,
                                          const Message& request) {
  switch (static_cast<int>(request.durability())) {
    case v1::DURABILITY_UNSPECIFIED:
      return Durability::kDefault;
    case v1::DURABILITY_MEMORY:
      return Durability::kMemory;
    case v1::DURABILITY_STEP:
      return Durability::kStep;
    default:
      return BadField(field, "is ", request.durability(),
                      ", must be a known Durability");
  }
}

// Checks the adapter's id, and `name`, the name of a checkpoint or a snapshot.
template <typename Message>
absl::Status CheckNames(const Message& request, const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(
      CheckAdapterId("adapter_id", request.adapter_id(), limits.engine_names));
  return CheckName("name", request.name());
}

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_ADAPTER_FIELDS_H_
