// Launches the kernels as a host would: prepared queries, splits, partial results, a merge.
#pragma once

#include <cstdarg>

#include "reference.h"

// The kernels of a module, and those that all share, by the names that a host calls.
#include "kernels.cu"
namespace cases {
typedef kvfs::KVFS_ELEMENT Element;
constexpr unsigned WIDTH = KVFS_WIDTH;
}  // namespace cases
#undef KVFS_ELEMENT
#include "kernels.cu"

namespace cases {

[[noreturn]] inline void fail(const std::string& setting, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::printf("FAILED %s: ", setting.c_str());
    std::vprintf(format, arguments);
    std::printf("\n");
    va_end(arguments);
    std::exit(1);
}

// Device memory that nobody has written yet.
inline std::vector<float> poisoned(size_t size) {
    std::vector<float> values(size, std::nanf(""));
    values.shrink_to_fit();
    return values;
}

// Which instance of the attention kernel runs.
struct Variant {
    unsigned rows;
    bool masked;
};

struct Partials {
    std::vector<float> o, m, l;

    Partials(size_t parts, const kvfs::Heads& heads)
        : m(poisoned(parts * heads.num_queries * heads.num_qo_heads())) {
        l = m;
        o = poisoned(m.size() * heads.v_head_dim);
    }
};

class Runner {
public:
    const Cache<Element>& cache;
    const Question& question;
    std::vector<kvfs::Split> splits;
    uint64_t seed;
    kvfs::Attention attention;

    Runner(const Cache<Element>& cache, const Question& question, std::vector<kvfs::Split> splits,
           uint64_t seed)
        : cache(cache), question(question), splits(std::move(splits)), seed(seed) {
        const kvfs::Heads& heads = cache.heads;
        for (int shift : question.shifts) {
            for (unsigned pair = 0; pair < question.rotation.pairs; ++pair) {
                const double angle = -shift * question.rotation.frequency(pair);
                turns_.push_back({static_cast<float>(std::cos(angle)),
                                  static_cast<float>(std::sin(angle))});
            }
        }
        prepared_ = poisoned(question.q.size() * question.shifts.size());
        const double cap = question.soft_cap;
        const float scale = cap != 0 ? question.scale / cap : question.scale / std::log(2.0);
        const kvfs::PrepareArguments prepare = {
            heads, scale, question.q.data(), turns_.data(), question.rotation.pairs,
            question.rotation.first, question.rotation.interleaved, prepared_.data()};
        launch(heads.num_queries * heads.num_qo_heads(), question.shifts.size(),
               [&] { ::prepare(prepare); });
        attention = {heads,
                     question.window,
                     static_cast<float>(cap),
                     prepared_.data(),
                     cache.pages.data(),
                     this->splits.data(),
                     question.masked ? question.positions.data() : nullptr};
    }

    void launch(size_t x, size_t y, const std::function<void()>& kernel) const {
        const dim3 grid = {static_cast<unsigned>(x), static_cast<unsigned>(y), 1};
        if (x * y > 0) shim::launch(grid, kvfs::BLOCK_THREADS, seed, kernel);
    }

    Partials attend(const Variant& variant) const {
        Partials partials(splits.size(), cache.heads);
        const kvfs::AttendArguments arguments = {attention, partials.o.data(), partials.m.data(),
                                                 partials.l.data()};
        const auto kernel = [&] {
            if (variant.masked) return attend_masked_8(arguments);
            switch (variant.rows) {
                case 1: return attend_1(arguments);
                case 2: return attend_2(arguments);
                case 4: return attend_4(arguments);
                case 5: return attend_5(arguments);
                default: return attend_8(arguments);
            }
        };
        const size_t passes = (cache.heads.rows() + variant.rows - 1) / variant.rows;
        launch(cache.heads.num_kv_heads * passes, splits.size(), kernel);
        return partials;
    }

    Partials merge(const Partials& parts) const {
        Partials merged(1, cache.heads);
        const kvfs::MergeArguments arguments = arguments_of(parts, nullptr, merged);
        launch(arguments.rows, 1, [&] { ::merge(arguments); });
        return merged;
    }

    std::vector<float> finish(const Partials& parts, const float* sinks) const {
        Partials out(1, cache.heads);
        const kvfs::MergeArguments arguments = arguments_of(parts, sinks, out);
        launch(arguments.rows, 1, [&] { ::finish(arguments); });
        return out.o;
    }

    // Added to what is there: 1 for each token.
    std::vector<float> mass(const Partials& merged) const {
        std::vector<float> mass(cache.positions.size(), 1);
        std::vector<kvfs::i64> positions = question.positions;
        // Queries far ahead see everything.
        if (!question.masked) positions.assign(positions.size(), kvfs::i64{1} << 40);
        kvfs::MassArguments arguments = {attention, merged.m.data(), merged.l.data(), mass.data()};
        arguments.attention.positions = positions.data();
        launch(splits.size(), 1, [&] { add_mass_4(arguments); });
        return mass;
    }

    std::vector<float> summary() const {
        const kvfs::Heads& heads = cache.heads;
        auto bounds = poisoned(cache.pages.size() * heads.num_kv_heads * 2 * heads.head_dim);
        const kvfs::SummaryArguments arguments = {cache.pages.data(), bounds.data(),
                                                  heads.num_kv_heads, heads.head_dim};
        launch(cache.pages.size(), heads.num_kv_heads,
               [&] { summarise_pages(arguments); });
        return bounds;
    }

    std::vector<float> most(const std::vector<float>& bounds) const {
        const kvfs::Heads& heads = cache.heads;
        const unsigned pages = cache.pages.size();
        auto most = poisoned(pages * heads.num_queries * heads.num_qo_heads());
        const float factor = question.soft_cap != 0 ? question.soft_cap : std::log(2.0);
        const kvfs::BoundArguments arguments = {heads, factor, prepared_.data(), cache.pages.data(),
                                                bounds.data(), pages, most.data()};
        launch(pages, heads.num_kv_heads, [&] { bound_pages(arguments); });
        return most;
    }

private:
    std::vector<float2> turns_;
    std::vector<float> prepared_;

    kvfs::MergeArguments arguments_of(const Partials& parts, const float* sinks,
                                      Partials& to) const {
        const kvfs::Heads& heads = cache.heads;
        return {parts.o.data(), parts.m.data(), parts.l.data(), sinks,
                to.o.data(), to.m.data(), to.l.data(), static_cast<unsigned>(splits.size()),
                heads.num_queries * heads.num_qo_heads(), heads.num_qo_heads(), heads.v_head_dim};
    }
};

}  // namespace cases
