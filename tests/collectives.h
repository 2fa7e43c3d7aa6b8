// Every collective once, over sizes that need care: what a transport carries must not depend on which one it is.
#pragma once

#include <string>
#include <vector>

#include "core/hash.h"
#include "dist/communicator.h"

namespace tessera::test {

class Collectives {
 public:
  explicit Collectives(dist::Transport& transport, int channel = 0)
      : world_("world", everyone(transport.size()), channel, transport, nullptr) {}

  // A hash of everything that this process received.
  std::string run() {
    for (const int64_t n : {0, 1, 2, 7, 1000, 100'003}) {  // the last is longer than what MPI sends unasked
      sums<float>(n);
      sums<double>(n);
      sums<int32_t>(n);
      sums<int64_t>(n);
      parts(n);
      neighbours(n);
      for (int root = 0; root < world_.size(); ++root) broadcast(n, root);
    }
    hash_.add_number(world_.sum(int64_t{world_.rank()}));
    hash_.add_field(std::to_string(world_.sum(1.0 / (3 + world_.rank()))));
    for (const std::string& text : world_.all_gather(std::string(size_t(world_.rank()), 'x'))) hash_.add_field(text);
    world_.barrier();
    return hash_.digest().hex();
  }

 private:
  static std::vector<int> everyone(int size) {
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    return ranks;
  }

  template <class T>
  std::vector<T> values(int64_t n, int64_t salt = 0) const {
    std::vector<T> v(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) v[size_t(i)] = static_cast<T>(double(i % 977 + salt) / (1 + world_.rank()));
    return v;
  }
  template <class T>
  static View view(std::vector<T>& v) {
    return {v.data(), dtype_of<T>, {std::ssize(v)}};
  }
  template <class T>
  void add(const std::vector<T>& v) {
    hash_.add_field({reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)});
  }

  template <class T>
  void sums(int64_t n) {
    std::vector<T> v = values<T>(n);
    world_.all_reduce(ctx_, view(v));
    add(v);
    world_.all_gather(view(v));
    add(v);
  }

  void broadcast(int64_t n, int root) {
    std::vector<float> v = values<float>(n, root);
    world_.broadcast(view(v), root);
    add(v);
  }

  // To each peer another length, none among them.
  void parts(int64_t n) {
    const auto length = [&](int from, int to) { return n * ((2 * from + to) % 3) / 2; };
    std::vector<std::vector<float>> out, in, terms;
    std::vector<View> send, receive, summed;
    for (int r = 0; r < world_.size(); ++r) {
      out.push_back(values<float>(length(world_.rank(), r), r));
      in.push_back(std::vector<float>(static_cast<size_t>(length(r, world_.rank()))));
      terms.push_back(values<float>(n * (r % 3), r));
    }
    for (int r = 0; r < world_.size(); ++r) {
      send.push_back(view(out[size_t(r)]));
      receive.push_back(view(in[size_t(r)]));
      summed.push_back(view(terms[size_t(r)]));
    }
    world_.all_to_all(send, receive);
    for (const auto& v : in) add(v);
    world_.reduce_scatter(ctx_, summed, summed[size_t(world_.rank())]);
    add(terms[size_t(world_.rank())]);
  }

  void neighbours(int64_t n) {
    std::vector<float> own = values<float>(n), left(own.size());
    const int rank = world_.rank(), size = world_.size();
    world_.send_receive(view(own), (rank + 1) % size, view(left), (rank + size - 1) % size);
    add(left);
  }

  dist::Communicator world_;
  Arena arena_{16 << 20};
  Context ctx_{Device::cpu, arena_};
  Hasher hash_;
};

}  // namespace tessera::test
