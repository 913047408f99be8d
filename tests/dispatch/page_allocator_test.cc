#include "src/dispatch/page_allocator.h"

#include <set>

#include "gtest/gtest.h"

namespace weft::dispatch {
namespace {

TEST(PageAllocatorTest, HandsOutEveryPageOnce) {
  PageAllocator pages(3);
  std::set<PageId> seen;
  for (int i = 0; i < 3; ++i) seen.insert(pages.Allocate().value());
  EXPECT_EQ(seen, (std::set<PageId>{0, 1, 2}));
  EXPECT_EQ(pages.Allocate(), std::nullopt);
  EXPECT_EQ(pages.num_used(), 3);
}

TEST(PageAllocatorTest, FreesAPageWithItsLastReference) {
  PageAllocator pages(1);
  const PageId page = pages.Allocate().value();
  EXPECT_TRUE(pages.Share(page));
  EXPECT_EQ(pages.num_references(page), 2);
  EXPECT_TRUE(pages.Release(page));
  EXPECT_EQ(pages.num_free(), 0);
  EXPECT_TRUE(pages.Release(page));
  EXPECT_EQ(pages.num_free(), 1);
  EXPECT_EQ(pages.Allocate(), page);
}

TEST(PageAllocatorTest, AKeptPageIsIdleAfterItsLastUser) {
  PageAllocator pages(2);
  const PageId page = pages.Allocate().value();
  EXPECT_TRUE(pages.Keep(page));
  EXPECT_FALSE(pages.Keep(page));
  EXPECT_FALSE(pages.IsIdle(page));
  EXPECT_TRUE(pages.Release(page));
  EXPECT_TRUE(pages.IsIdle(page));
  EXPECT_EQ(pages.num_idle(), 1);
  EXPECT_EQ(pages.num_used(), 0);
  EXPECT_EQ(pages.num_free(), 1);
  EXPECT_FALSE(pages.Release(page));  // The page has no user.
  EXPECT_TRUE(pages.Share(page));
  EXPECT_EQ(pages.num_idle(), 0);
  EXPECT_TRUE(pages.Release(page));
  EXPECT_TRUE(pages.Forget(page));
  EXPECT_FALSE(pages.Forget(page));
  EXPECT_EQ(pages.num_idle(), 0);
  EXPECT_EQ(pages.num_free(), 2);
}

TEST(PageAllocatorTest, AForgottenPageStaysWithItsUsers) {
  PageAllocator pages(1);
  const PageId page = pages.Allocate().value();
  EXPECT_TRUE(pages.Keep(page));
  EXPECT_TRUE(pages.Forget(page));
  EXPECT_EQ(pages.num_used(), 1);
  EXPECT_TRUE(pages.Release(page));
  EXPECT_EQ(pages.num_free(), 1);
}

TEST(PageAllocatorTest, RefusesPagesThatAreNotInUse) {
  PageAllocator pages(2);
  for (const PageId page : {0, -1, 2}) {
    EXPECT_FALSE(pages.Share(page));
    EXPECT_FALSE(pages.Release(page));
    EXPECT_FALSE(pages.Keep(page));
    EXPECT_FALSE(pages.Forget(page));
    EXPECT_FALSE(pages.IsIdle(page));
    EXPECT_EQ(pages.num_references(page), 0);
  }
  EXPECT_EQ(pages.num_free(), 2);
}

}  // namespace
}  // namespace weft::dispatch
