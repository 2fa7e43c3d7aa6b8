#include "dist/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "dist/in_process.h"
#include "dist/mesh.h"

namespace tessera::dist {
namespace {

template <class T>
View view_of(std::vector<T>& v) {
  return {v.data(), dtype_of<T>, {std::ssize(v)}};
}

// Calls f(world, context) in every process of a world of that many.
template <class F>
void with_world(int processes, F&& f, InProcessOptions options = {}) {
  run_in_process(processes, options, [&](Transport& transport) {
    Arena arena(1 << 20);
    Context ctx{Device::cpu, arena};
    std::vector<int> members;
    for (int r = 0; r < processes; ++r) members.push_back(r);
    Communicator world("world", members, 0, transport, nullptr);
    f(world, ctx);
  });
}

float value(int rank, int64_t i) { return 1.0f / float(1 + rank) + 1e-3f * float(i); }

TEST(Communicator, SumsAreTakenInTheOrderOfTheRanks) {
  for (const int processes : {1, 2, 3, 4, 8}) {
    for (const int64_t n : {0, 1, 2, 7, 1000}) {
      with_world(processes, [&](Communicator& world, Context& ctx) {
        std::vector<float> values(static_cast<size_t>(n)), wanted(values);
        for (int64_t i = 0; i < n; ++i) {
          values[size_t(i)] = value(world.rank(), i);
          wanted[size_t(i)] = value(0, i);
          for (int r = 1; r < processes; ++r) wanted[size_t(i)] += value(r, i);
        }
        world.all_reduce(ctx, view_of(values));
        EXPECT_EQ(values, wanted);
        EXPECT_EQ(ctx.arena.used(), 0);
      });
    }
  }
}

TEST(Communicator, SumsOfEveryType) {
  with_world(3, [](Communicator& world, Context& ctx) {
    std::vector<double> f64(5, 0.5);
    std::vector<int32_t> i32(5, world.rank());
    std::vector<int64_t> i64(5, int64_t{1} << 40);
    world.all_reduce(ctx, view_of(f64));
    world.all_reduce(ctx, view_of(i32));
    world.all_reduce(ctx, view_of(i64));
    EXPECT_EQ(f64, std::vector<double>(5, 1.5));
    EXPECT_EQ(i32, std::vector<int32_t>(5, 3));
    EXPECT_EQ(i64, std::vector<int64_t>(5, int64_t{3} << 40));
    EXPECT_EQ(world.sum(int64_t{7}), 21);
    EXPECT_EQ(world.sum(0.25), 0.75);
  });
}

TEST(Communicator, UnevenAndEmptyParts) {
  with_world(4, [](Communicator& world, Context& ctx) {
    const auto length = [](int from, int to) { return (from * 2 + to) % 4; };  // 0 among them
    std::vector<std::vector<float>> out(4), in(4);
    std::vector<View> send, receive;
    for (int r = 0; r < 4; ++r) {
      out[size_t(r)].assign(size_t(length(world.rank(), r)), float(10 * world.rank() + r));
      in[size_t(r)].assign(size_t(length(r, world.rank())), -1);
      send.push_back(view_of(out[size_t(r)]));
      receive.push_back(view_of(in[size_t(r)]));
    }
    world.all_to_all(send, receive);
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(in[size_t(r)], std::vector<float>(size_t(length(r, world.rank())), float(10 * r + world.rank())));
    }
    EXPECT_EQ(world.all_gather(std::string(size_t(world.rank()), 'x')),
              (std::vector<std::string>{"", "x", "xx", "xxx"}));

    std::vector<float> own(size_t(world.rank()), 1);  // rank r holds the sum of r elements
    std::vector<std::vector<float>> parts(4);
    std::vector<View> views;
    for (int r = 0; r < 4; ++r) {
      parts[size_t(r)].assign(size_t(r), float(world.rank() + 1));
      views.push_back(view_of(parts[size_t(r)]));
    }
    world.reduce_scatter(ctx, views, view_of(own));
    EXPECT_EQ(own, std::vector<float>(size_t(world.rank()), 10));
  });
}

TEST(Communicator, BroadcastAndNeighbours) {
  with_world(3, [](Communicator& world, Context&) {
    std::vector<float> values(3, float(world.rank()));
    world.broadcast(view_of(values), 2);
    EXPECT_EQ(values, std::vector<float>(3, 2));
    std::vector<float> own(2, float(world.rank())), left(2, -1);
    const bool first = world.rank() == 0, last = world.rank() == 2;
    world.send_receive(last ? View() : view_of(own), world.rank() + 1, first ? View() : view_of(left),
                       world.rank() - 1);
    EXPECT_EQ(left, std::vector<float>(2, float(world.rank() - 1)));
  });
}

TEST(Communicator, CountsBytesInsideAndAcrossNodes) {
  with_world(4,
             [](Communicator& world, Context& ctx) {
               std::vector<float> values(4000, 1);
               world.all_reduce(ctx, view_of(values));
               // 2 (n - 1) / n of the buffer, a third of it to the other rank of the node
               EXPECT_EQ(world.traffic().inside, 2 * 4000);
               EXPECT_EQ(world.traffic().across, 2 * 2 * 4000);
               Arena dry = Arena::dry();
               Context plan{Device::dry, dry};
               DryTransport transport(world.rank(), {0, 0, 1, 1});
               Communicator planned("world", {0, 1, 2, 3}, 0, transport, nullptr);
               planned.all_reduce(plan, dry.allocate(DType::f32, {4000}));
               EXPECT_EQ(planned.traffic().inside, world.traffic().inside);
               EXPECT_EQ(planned.traffic().across, world.traffic().across);
             },
             {.ranks_per_node = 2});
}

TEST(Communicator, APeerThatDoesNotAnswerIsNamed) {
  std::atomic<int> told = 0;
  try {
    with_world(3,
               [&](Communicator& world, Context&) {
                 if (world.rank() == 1) return;
                 try {
                   world.barrier();
                 } catch (const LostProcess&) {
                   ++told;
                   throw;
                 }
               },
               {.deadline_seconds = 0.2});
    FAIL() << "wanted an exception";
  } catch (const LostProcess& e) {
    EXPECT_TRUE(std::string(e.what()).ends_with("all_gather along the world axis: no answer from rank 1 in 0.2 s"))
        << e.what();
  }
  EXPECT_EQ(told, 2);
}

TEST(Communicator, AProcessThatFailsEndsTheOthersAtOnce) {
  std::atomic<int> told = 0;
  EXPECT_THROW(with_world(4,
                          [&](Communicator& world, Context&) {
                            if (world.rank() == 2) fail_user("the disk is full");
                            try {
                              world.barrier();
                            } catch (const LostProcess& e) {
                              EXPECT_NE(std::string(e.what()).find("rank 2 ended: the disk is full"),
                                        std::string::npos);
                              ++told;
                              throw;
                            }
                          }),
               UserError);
  EXPECT_EQ(told, 3);
}

TEST(Mesh, GroupsOfEveryAxis) {
  const Layout layout{.data = 2, .expert = 2, .context = 2, .pipeline = 2, .tensor = 2};
  const auto members = [](const Communicator& c) {
    std::vector<int> ranks;
    for (int r = 0; r < c.size(); ++r) ranks.push_back(c.rank_in_job(r));
    return ranks;
  };
  DryTransport transport(5, std::vector<int>(16, 0));  // stage 0, data 1, context 0, tensor 1
  const Mesh mesh(layout, transport);
  EXPECT_EQ(members(mesh.tensor), (std::vector<int>{4, 5}));
  EXPECT_EQ(members(mesh.context), (std::vector<int>{5, 7}));
  EXPECT_EQ(members(mesh.replica), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(members(mesh.expert), (std::vector<int>{5, 7}));
  EXPECT_EQ(members(mesh.expert_replica), (std::vector<int>{1, 5}));
  EXPECT_EQ(members(mesh.pipeline), (std::vector<int>{5, 13}));
  EXPECT_EQ(mesh.data_index, 1);
  EXPECT_EQ(mesh.pipeline.rank(), 0);
}

TEST(Mesh, LayoutsThatCannotBe) {
  DryTransport transport(0, {0, 0, 0, 0});
  EXPECT_THROW(Mesh({.data = 2}, transport), UserError);
  EXPECT_THROW((Layout{.data = 4, .expert = 3}.check("run.toml")), UserError);
  EXPECT_EQ((Layout{.data = 2, .context = 4}.to_string()), "data 2 x context 4");
}

}  // namespace
}  // namespace tessera::dist
