#include "ffi/eager_layout.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace cudnn_jax::layout {
namespace {

// How many elements along an axis two indices may lie apart.
struct Axis {
  int64_t stride;
  int64_t low;
  int64_t high;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Looks for a difference on every axis so that together they step over `distance` elements.
class Search {
 public:
  explicit Search(std::vector<Axis> axes) : axes_(std::move(axes)) {
    std::sort(axes_.begin(), axes_.end(), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    low_.resize(axes_.size() + 1);
    high_.resize(axes_.size() + 1);
    for (size_t i = axes_.size(); i-- > 0;) {
      low_[i] = low_[i + 1] + axes_[i].low * axes_[i].stride;
      high_[i] = high_[i + 1] + axes_[i].high * axes_[i].stride;
    }
  }

  bool finds(int64_t distance, size_t from = 0) {
    if (distance < low_[from] || distance > high_[from]) return false;
    if (from == axes_.size() || --steps_ < 0) return true;
    const Axis& axis = axes_[from];
    // The inner axes reach the rest. Where the axes nest, as a dense array's, that leaves two candidates.
    const int64_t first = std::max(axis.low, -floor_div(high_[from + 1] - distance, axis.stride));
    const int64_t last = std::min(axis.high, floor_div(distance - low_[from + 1], axis.stride));
    for (int64_t step = first; step <= last; ++step) {
      if (finds(distance - step * axis.stride, from + 1)) return true;
    }
    return false;
  }

 private:
  std::vector<Axis> axes_;
  std::vector<int64_t> low_;  // of the distances that the axes from here on step over
  std::vector<int64_t> high_;
  int steps_ = 10'000;
};

}  // namespace

bool folds(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] <= 1) continue;
    if (strides[i] == 0) return true;
    axes.push_back({strides[i], 1 - shape[i], shape[i] - 1});
  }
  // Two elements that differ first on axis i: of each pair that one which lies further along it.
  for (size_t i = 0; i < axes.size(); ++i) {
    std::vector<Axis> differing(axes.begin() + static_cast<std::ptrdiff_t>(i), axes.end());
    differing[0].low = 1;
    if (Search(std::move(differing)).finds(0)) return true;
  }
  return false;
}

bool meet(const std::vector<int64_t>& a_shape, const std::vector<int64_t>& a_strides,
          const std::vector<int64_t>& b_shape, const std::vector<int64_t>& b_strides, int64_t offset) {
  if (a_shape.size() != b_shape.size()) return true;
  std::vector<Axis> axes;
  for (size_t i = 0; i < a_shape.size(); ++i) {
    const bool of_a = a_shape[i] > 1;
    const bool of_b = b_shape[i] > 1;
    if (of_a && of_b && a_strides[i] != b_strides[i]) return true;
    const int64_t stride = of_a ? a_strides[i] : b_strides[i];
    if ((of_a || of_b) && stride > 0) axes.push_back({stride, 1 - b_shape[i], a_shape[i] - 1});
  }
  return Search(std::move(axes)).finds(offset);
}

}  // namespace cudnn_jax::layout
