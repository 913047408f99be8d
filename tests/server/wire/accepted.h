// Checks the properties of an accepted request that later layers rely on and do
// not check again.
#ifndef WEFT_TESTS_SERVER_WIRE_ACCEPTED_H_
#define WEFT_TESTS_SERVER_WIRE_ACCEPTED_H_

#include <string>
#include <utility>

#include "server/wire/request_validation.h"

namespace weft::server {

// Each adds a test failure for every property that does not hold.
void ExpectUsable(const TrainRequest& request, const RequestLimits& limits);
void ExpectUsable(const OptimStepRequest& request, const RequestLimits& limits);
void ExpectUsable(const SampleRequest& request, const RequestLimits& limits);
void ExpectUsable(const ProfileRequest& request, const RequestLimits& limits);
void ExpectUsable(const CreateAdapterRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const ListAdaptersRequest& request,
                  const RequestLimits& limits);
// For an adapter's id, and for an adapter's id with a checkpoint's name.
void ExpectUsable(const std::string& adapter_id, const RequestLimits& limits);
void ExpectUsable(const std::pair<std::string, std::string>& names,
                  const RequestLimits& limits);

// A name, TENANT~ID or ID, and the files of an adapter.
void ExpectName(const std::string& name);
void ExpectId(const std::string& id);
void ExpectFiles(const PeftFiles& files);

// For requests of names and files.
template <typename Request>
void ExpectUsable(const Request& request, const RequestLimits& /*limits*/) {
  ExpectId(request.adapter_id);
  if constexpr (requires { request.name; }) ExpectName(request.name);
  if constexpr (requires { request.snapshot; }) {
    if (!request.snapshot.empty()) ExpectName(request.snapshot);
  }
  if constexpr (requires { request.tenant; }) {
    if (!request.tenant.empty()) ExpectName(request.tenant);
  }
  if constexpr (requires { request.files; }) {
    ExpectFiles(request.files);
  } else if constexpr (requires { request.source_adapter_id; }) {
    ExpectId(request.source_adapter_id);
  }
}

}  // namespace weft::server

#endif  // WEFT_TESTS_SERVER_WIRE_ACCEPTED_H_
