#include "server/flags/thread_room.h"

#include <pthread.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace weft::server {
namespace {

void* WaitFor(void* all_there) {
  static_cast<absl::Notification*>(all_there)->WaitForNotification();
  return nullptr;
}

}  // namespace

absl::Status CheckThreads(int count) {
  absl::Notification all_there;
  std::vector<pthread_t> threads;
  int error = 0;
  // std::thread would throw.
  for (int i = 0; i < count && error == 0; ++i) {
    pthread_t thread;
    error = pthread_create(&thread, nullptr, WaitFor, &all_there);
    if (error == 0) threads.push_back(thread);
  }
  all_there.Notify();
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  if (error == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(
      error,
      absl::StrCat("cannot start a thread (the limit of processes leaves "
                   "room for ",
                   threads.size(), ", weftd needs ", count,
                   "; raise pids.max of the control group, or ulimit "
                   "-u)"));
}

}  // namespace weft::server
