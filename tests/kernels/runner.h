// Launches the kernels as a host would: prepared queries, splits, partial results, a merge.
#pragma once

#include <cstdarg>

#include "attend.h"
#include "mass.h"
#include "merge.h"
#include "module.h"
#include "prepare.h"
#include "reference.h"
#include "summary.h"

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

// The kernels of a dtype and a width, and those that all share.
struct Kernels {
    const Stored& stored;
    unsigned width;
    Module own, common;
};

class Runner {
public:
    const Kernels& kernels;
    const Cache& cache;
    const Question& question;
    std::vector<kvfs::Split> splits;
    uint64_t seed;
    kvfs::Attention attention;

    Runner(const Kernels& kernels, const Cache& cache, const Question& question,
           std::vector<kvfs::Split> splits, uint64_t seed)
        : kernels(kernels), cache(cache), question(question), splits(std::move(splits)), seed(seed) {
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
        launch(kernels.common, "prepare", heads.num_queries * heads.num_qo_heads(),
               question.shifts.size(), prepare);
        attention = {heads,
                     question.window,
                     static_cast<float>(cap),
                     prepared_.data(),
                     cache.pages.data(),
                     this->splits.data(),
                     question.masked ? question.positions.data() : nullptr};
    }

    template <class Arguments>
    void launch(const Module& module, const char* kernel, size_t x, size_t y,
                const Arguments& arguments) const {
        module.launch(kernel, x, y, seed, arguments);
    }

    Partials attend(const Variant& variant) const {
        Partials partials(splits.size(), cache.heads);
        const kvfs::AttendArguments arguments = {attention, partials.o.data(), partials.m.data(),
                                                 partials.l.data()};
        const std::string kernel =
            std::string(variant.masked ? "attend_masked_" : "attend_") + std::to_string(variant.rows);
        const size_t passes = (cache.heads.rows() + variant.rows - 1) / variant.rows;
        launch(kernels.own, kernel.c_str(), cache.heads.num_kv_heads * passes, splits.size(),
               arguments);
        return partials;
    }

    Partials merge(const Partials& parts) const {
        Partials merged(1, cache.heads);
        const kvfs::MergeArguments arguments = arguments_of(parts, nullptr, merged);
        launch(kernels.common, "merge", arguments.rows, 1, arguments);
        return merged;
    }

    std::vector<float> finish(const Partials& parts, const float* sinks) const {
        Partials out(1, cache.heads);
        const kvfs::MergeArguments arguments = arguments_of(parts, sinks, out);
        launch(kernels.common, "finish", arguments.rows, 1, arguments);
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
        launch(kernels.own, "add_mass_4", splits.size(), 1, arguments);
        return mass;
    }

    std::vector<float> summary() const {
        const kvfs::Heads& heads = cache.heads;
        auto bounds = poisoned(cache.pages.size() * heads.num_kv_heads * 2 * heads.head_dim);
        const kvfs::SummaryArguments arguments = {cache.pages.data(), bounds.data(),
                                                  heads.num_kv_heads, heads.head_dim};
        launch(kernels.own, "summarise_pages", cache.pages.size(), heads.num_kv_heads, arguments);
        return bounds;
    }

    std::vector<float> most(const std::vector<float>& bounds) const {
        const kvfs::Heads& heads = cache.heads;
        const unsigned pages = cache.pages.size();
        auto most = poisoned(pages * heads.num_queries * heads.num_qo_heads());
        const float factor = question.soft_cap != 0 ? question.soft_cap : std::log(2.0);
        const kvfs::BoundArguments arguments = {heads, factor, prepared_.data(), cache.pages.data(),
                                                bounds.data(), pages, most.data()};
        launch(kernels.common, "bound_pages", pages, heads.num_kv_heads, arguments);
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
