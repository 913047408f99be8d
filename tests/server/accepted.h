// Checks the properties of an accepted request that later layers rely on and do
// not check again.
#ifndef WEFT_TESTS_SERVER_ACCEPTED_H_
#define WEFT_TESTS_SERVER_ACCEPTED_H_

#include <string>
#include <utility>

#include "server/request_validation.h"

namespace weft {

// Each adds a test failure for every property that does not hold.
void ExpectUsable(const TrainRequest& request, const RequestLimits& limits);
void ExpectUsable(const OptimStepRequest& request, const RequestLimits& limits);
void ExpectUsable(const SampleRequest& request, const RequestLimits& limits);
void ExpectUsable(const ProfileRequest& request, const RequestLimits& limits);
void ExpectUsable(const CreateAdapterRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const ListAdaptersRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const SaveCheckpointRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const LoadCheckpointRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const PublishSnapshotRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const ReleaseSnapshotRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const ExportAdapterRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const UploadCheckpointRequest& request,
                  const RequestLimits& limits);
void ExpectUsable(const ImportAdapterRequest& request,
                  const RequestLimits& limits);
// For an adapter's id, and for an adapter's id with a checkpoint's name.
void ExpectUsable(const std::string& adapter_id, const RequestLimits& limits);
void ExpectUsable(const std::pair<std::string, std::string>& names,
                  const RequestLimits& limits);

}  // namespace weft

#endif  // WEFT_TESTS_SERVER_ACCEPTED_H_
