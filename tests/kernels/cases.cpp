// Every kernel of one module under the shim, against f64.
//
//   cases SEEDS DTYPE WIDTH MODULE COMMON    runs each variant with so many seeds; prints the worst
//                                            error of each, or what failed, with a status of 1
//
// MODULE is the library of that dtype and width, COMMON that of the kernels which all share.
#include <numeric>

#include "runner.h"

namespace cases {

// Relative L2. Sums of a hundred f32 and logits of up to ten leave some 1e-7.
constexpr double ERROR_MAX = 2e-6;

// |found - expected| / |expected|
double distance(const std::vector<float>& found, const std::vector<double>& expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        error += std::pow(found[i] - expected[i], 2);
        size += std::pow(expected[i], 2);
    }
    return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}

// One setting: what is attended to, and how it is cut into splits.
struct Setting {
    std::string module;
    Variant variant;
    kvfs::Heads heads;
    Layout layout;
    std::vector<unsigned> pages;
    Question question;
    std::vector<unsigned> copies;
    std::vector<kvfs::Split> splits;
    uint64_t seed;

    std::string name() const {
        std::string text = module;
        text += variant.masked ? " masked" : " rows " + std::to_string(variant.rows);
        text += " seed " + std::to_string(seed);
        const unsigned numbers[] = {heads.num_queries, heads.num_kv_heads, heads.group,
                                    heads.head_dim, heads.v_head_dim};
        const char* names[] = {" queries ", " kv_heads ", " group ", " head_dim ", " v_head_dim "};
        for (unsigned i = 0; i < 5; ++i) text += names[i] + std::to_string(numbers[i]);
        text += " layout " + std::to_string(static_cast<int>(layout)) + " pages";
        for (unsigned tokens : pages) text += " " + std::to_string(tokens);
        text += " splits";
        for (const kvfs::Split& split : splits) text += " " + std::to_string(split.tokens);
        return text + " window " + std::to_string(question.window) + " soft cap " +
               std::to_string(question.soft_cap);
    }
};

template <class T>
T choose(Random& random, std::initializer_list<T> values) {
    return *(values.begin() + below(random, values.size()));
}

kvfs::Heads random_heads(const Kernels& kernels, const Variant& variant, Random& random) {
    kvfs::Heads heads = {};
    heads.num_kv_heads = 1 + below(random, 2);
    heads.num_queries = variant.masked ? 1 + below(random, 6) : 1;
    heads.group = variant.masked ? choose(random, {1u, 2u, 3u})
                  : variant.rows == 4 ? choose(random, {3u, 4u})
                  : variant.rows == 8 ? choose(random, {6u, 7u, 8u, 11u})
                                      : variant.rows;
    const bool blocks = kernels.stored.elements > 1;
    const unsigned width = kernels.width;
    heads.head_dim = width == 64    ? (blocks ? 64 : choose(random, {64u, 64u, 40u}))
                     : width == 128 ? choose(random, {128u, 96u, blocks ? 128u : 80u})
                                            : choose(random, {256u, 192u});
    // One in three differs from it.
    heads.v_head_dim = choose(random, {heads.head_dim, heads.head_dim, width / 2});
    return heads;
}

// Cuts the tokens at random places, in pages or between them; some splits are empty.
std::vector<kvfs::Split> random_splits(const std::vector<unsigned>& pages, Random& random) {
    unsigned total = std::accumulate(pages.begin(), pages.end(), 0u);
    std::vector<unsigned> cuts = {0, total};
    for (unsigned count = below(random, 4); count > 0; --count) {
        cuts.push_back(below(random, total + 1));
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<kvfs::Split> splits;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        unsigned page = 0, token = cuts[i];
        while (page < pages.size() && token >= pages[page]) token -= pages[page++];
        splits.push_back({page, token, cuts[i + 1] - cuts[i]});
    }
    return splits;
}

Question random_question(const Setting& setting, Random& random) {
    Question question;
    const kvfs::Heads& heads = setting.heads;
    question.q.resize(heads.num_queries * heads.num_qo_heads() * heads.head_dim);
    for (float& q : question.q) q = 2 * normal(random);
    for (unsigned head = 0; head < heads.num_qo_heads(); ++head) {
        question.sinks.push_back(normal(random));
    }
    question.scale = uniform(random, 0.5, 1.5) / std::sqrt(heads.head_dim);
    question.soft_cap = choose(random, {0.0, 0.0, 3.0});
    question.masked = setting.variant.masked;
    const unsigned tokens = std::accumulate(setting.pages.begin(), setting.pages.end(), 0u);
    for (unsigned query = 0; query < heads.num_queries; ++query) {
        // The last tokens, as in a chunk, or any.
        const unsigned chunk = tokens - std::min(tokens, heads.num_queries) + query;
        question.positions.push_back(setting.seed % 2 ? chunk : below(random, tokens + 9));
    }
    if (question.masked) question.window = choose(random, {0u, 0u, 1u, 7u, 50u});
    question.rotation.interleaved = below(random, 2);
    question.rotation.pairs = choose(random, {heads.head_dim / 2, heads.head_dim / 4});
    question.rotation.first = below(random, heads.head_dim - 2 * question.rotation.pairs + 1);
    question.shifts = {0};
    if (below(random, 2)) question.shifts = {0, static_cast<int>(below(random, 200)) - 100, 3};
    return question;
}

Setting random_setting(const Kernels& kernels, const Variant& variant, uint64_t seed) {
    Random random(seed * 1000003 + kernels.width * 16 + variant.rows * 2 + variant.masked);
    Setting setting = {};
    setting.module = std::string(kernels.stored.name) + "_" + std::to_string(kernels.width);
    setting.variant = variant;
    setting.seed = seed;
    setting.heads = random_heads(kernels, variant, random);
    setting.layout = choose(random, {Layout::HeadMajor, Layout::TokenMajor, Layout::Tail});
    for (unsigned count = 1 + below(random, 3); count > 0; --count) {
        // One short page, or none; single tokens and empty pages.
        setting.pages.push_back(choose(random, {64u, 64u, 1 + below(random, 90), 1u, 0u}));
    }
    setting.question = random_question(setting, random);
    for (size_t page = 0; page < setting.pages.size(); ++page) {
        setting.copies.push_back(below(random, setting.question.shifts.size()));
    }
    setting.splits = random_splits(setting.pages, random);
    return setting;
}

void check_partials(const std::string& name, const kvfs::Heads& heads, const Partials& merged,
                    const Answer& answer) {
    const unsigned dim = heads.v_head_dim;
    std::vector<float> out;
    for (size_t row = 0; row < answer.m.size(); ++row) {
        const float m = merged.m[row], l = merged.l[row];
        if (answer.l[row] == 0 && (m != kvfs::EMPTY_M || l != 0)) {
            fail(name, "row %zu sees nothing, but m is %g and l is %g", row, m, l);
        }
        const double off = std::fabs(m - answer.m[row]) / (1 + std::fabs(answer.m[row]));
        const double lse = m + std::log(l), expected = answer.m[row] + std::log(answer.l[row]);
        if (!(off < 1e-5) || (l != 0 && !(std::fabs(lse - expected) < 1e-5))) {
            fail(name, "row %zu: m %.9g l %.9g, not m %.9g l %.9g", row, m, l, answer.m[row],
                 answer.l[row]);
        }
        for (unsigned i = 0; i < dim; ++i) {
            const float o = merged.o[row * dim + i];
            out.push_back(l == 0 ? o : o / l);
        }
    }
    const double error = distance(out, answer.out);
    if (!(error <= ERROR_MAX)) fail(name, "o is off by %.2e", error);
}

// Smallest and largest K, and the bounds that follow.
void check_bounds(const std::string& name, const Runner& runner,
                  const Reference& reference) {
    const auto& cache = runner.cache;
    const kvfs::Heads& heads = cache.heads;
    const unsigned dim = heads.head_dim, pages = cache.pages.size();
    const std::vector<float> bounds = runner.summary(), most = runner.most(bounds);
    for (unsigned index = 0; index < pages; ++index) {
        const kvfs::Page& page = cache.pages[index];
        for (unsigned at = 0; at < heads.num_kv_heads * dim; ++at) {
            double lower = INFINITY, upper = -INFINITY;
            for (unsigned token = 0; token < page.tokens; ++token) {
                const double k = cache.k[(page.index + token) * heads.num_kv_heads * dim + at];
                lower = std::min(lower, k), upper = std::max(upper, k);
            }
            const float* found =
                &bounds[((index * heads.num_kv_heads + at / dim) * 2) * dim + at % dim];
            if (found[0] != static_cast<float>(lower) || found[dim] != static_cast<float>(upper)) {
                fail(name, "page %u, element %u of K is from %g to %g, not %g to %g", index, at,
                     lower, upper, found[0], found[dim]);
            }
        }
        for (unsigned query = 0; query < heads.num_queries; ++query) {
            for (unsigned head = 0; head < heads.num_qo_heads(); ++head) {
                const float bound = most[(query * heads.num_qo_heads() + head) * pages + index];
                double largest = -INFINITY;
                for (unsigned token = 0; token < page.tokens; ++token) {
                    largest = std::max(largest,
                                       reference.product(query, head, page.index + token));
                }
                // Of a single token the bound is the logit itself.
                const double slack = 1e-5 * (1 + std::fabs(largest));
                const bool tight = page.tokens != 1 || bound <= largest + slack;
                if (!(bound >= largest - slack && tight)) {
                    fail(name, "page %u, query %u, head %u: a logit of %g, the bound is %g", index,
                         query, head, largest, bound);
                }
            }
        }
    }
}

// All kernels for one setting; the error of the final result.
double check(const Kernels& kernels, const Setting& setting) {
    Random random(setting.seed);
    Cache cache(kernels.stored, setting.heads, setting.pages, setting.layout, random);
    for (size_t page = 0; page < cache.pages.size(); ++page) {
        cache.pages[page].queries = setting.copies[page];
    }
    const Reference reference(cache, setting.question);
    const Answer answer = reference.answer();
    const Runner runner(kernels, cache, setting.question, setting.splits, setting.seed);
    const Partials parts = runner.attend(setting.variant), merged = runner.merge(parts);
    const std::string name = setting.name();
    check_partials(name, setting.heads, merged, answer);
    const double error = distance(runner.finish(parts, nullptr), answer.out);
    const double with_sinks =
        distance(runner.finish(parts, setting.question.sinks.data()), answer.out_with_sinks);
    if (!(std::max(error, with_sinks) <= ERROR_MAX)) {
        fail(name, "the result is off by %.2e, with sinks by %.2e", error, with_sinks);
    }
    std::vector<float> mass = runner.mass(merged);
    for (float& of_token : mass) of_token -= 1;
    const double mass_error = distance(mass, answer.mass);
    // 1 was added, so what is far below it is lost.
    if (!(mass_error <= 1e-5)) fail(name, "the mass is off by %.2e", mass_error);
    check_bounds(name, runner, reference);
    return error;
}

// What no K and V mean.
void check_empty(const Kernels& kernels, const Variant& variant) {
    Setting setting = random_setting(kernels, variant, 1);
    setting.pages.clear();
    setting.copies.clear();
    setting.splits.clear();
    check(kernels, setting);
    setting.splits = {{0, 0, 0}};
    check(kernels, setting);
}

void check_variants(const Kernels& kernels, uint64_t seeds) {
    const Variant variants[] = {{1, false}, {2, false}, {4, false}, {5, false}, {8, false}, {8, true}};
    for (const Variant& variant : variants) {
        double worst = 0;
        for (uint64_t seed = 1; seed <= seeds; ++seed) {
            worst = std::max(worst, check(kernels, random_setting(kernels, variant, seed)));
        }
        check_empty(kernels, variant);
        std::printf("%s_%u %s %u: %.1e\n", kernels.stored.name, kernels.width,
                    variant.masked ? "masked" : "rows", variant.rows, worst);
    }
}

// Many parts, more than a warp has lanes, of any size and some of them empty.
void check_merge(const Kernels& kernels) {
    Random random(11);
    Setting setting = random_setting(kernels, {1, false}, 1);
    setting.heads = {2, 1, 2, kernels.width, kernels.width};
    const unsigned rows = 4, dim = kernels.width;
    for (const unsigned count : {0u, 1u, 3u, 5u, 31u, 33u, 66u, 130u}) {
        setting.splits.assign(count, {0, 0, 0});
        setting.question = random_question(setting, random);
        const Cache cache(kernels.stored, setting.heads, {}, Layout::HeadMajor, random);
        const Runner runner(kernels, cache, setting.question, setting.splits, count);
        Partials parts(count, setting.heads);
        for (unsigned at = 0; at < count * rows; ++at) {
            const bool empty = below(random, 4) == 0;
            // The largest is as likely to be the last.
            parts.m[at] = empty ? kvfs::EMPTY_M : uniform(random, -40, 40) + at / rows;
            parts.l[at] = empty ? 0 : uniform(random, 0.5, 20);
            for (unsigned i = 0; i < dim; ++i) parts.o[at * dim + i] = empty ? 0 : normal(random);
        }
        const Partials merged = runner.merge(parts);
        const std::string name = "merge of " + std::to_string(count) + " parts";
        std::vector<double> out, with_sinks, o(dim);
        for (unsigned row = 0; row < rows; ++row) {
            double top = kvfs::EMPTY_M, l = 0;
            for (unsigned part = 0; part < count; ++part) {
                top = std::max<double>(top, parts.m[part * rows + row]);
            }
            o.assign(dim, 0);
            for (unsigned part = 0; part < count; ++part) {
                const unsigned at = part * rows + row;
                const double weight = std::exp(parts.m[at] - top);
                l += weight * parts.l[at];
                for (unsigned i = 0; i < dim; ++i) o[i] += weight * parts.o[at * dim + i];
            }
            if (merged.m[row] != top || !(std::fabs(merged.l[row] - l) <= 1e-5 * l)) {
                fail(name, "row %u: m %.9g l %.9g, not m %.9g l %.9g", row, merged.m[row],
                     merged.l[row], top, l);
            }
            const double sink = std::exp(setting.question.sinks[row % 2] - top);
            for (unsigned i = 0; i < dim; ++i) {
                out.push_back(l == 0 ? 0 : o[i] / l);
                with_sinks.push_back(l == 0 ? 0 : o[i] / (l + sink));
            }
        }
        const double error = distance(runner.finish(parts, nullptr), out);
        const double with =
            distance(runner.finish(parts, setting.question.sinks.data()), with_sinks);
        // Differences of m of up to 100 in f32 leave some 1e-6.
        if (!(std::max(error, with) <= 1e-5)) {
            fail(name, "the result is off by %.2e, with sinks by %.2e", error, with);
        }
    }
}

// Any bits at all, NaN and infinities among them.
void check_conversion(const Kernels& kernels) {
    constexpr unsigned COUNT = 256;
    void (*convert)(const uint8_t*, unsigned, float*);
    kernels.own.symbol("kvfs_module_convert", convert);
    const Stored& stored = kernels.stored;
    Random random(7);
    Memory row(stored.row_bytes(COUNT));
    for (unsigned round = 0; round < 2000; ++round) {
        for (unsigned i = 0; i < stored.row_bytes(COUNT); ++i) row.bytes[i] = random();
        auto values = poisoned(COUNT);
        convert(row.bytes.get(), COUNT, values.data());
        for (unsigned index = 0; index < COUNT; ++index) {
            const float value = values[index], expected = stored.element(row.bytes.get(), index);
            const bool both_nan = std::isnan(value) && std::isnan(expected);
            if (value != expected && !both_nan) {
                fail(stored.name, "element %u is %g, not %g", index, value, expected);
            }
        }
    }
}

// An infinite value reaches the queries that see it, and no other.
void check_damaged(const Kernels& kernels) {
    if (std::string(kernels.stored.name) != "f32") return;
    const unsigned width = kernels.width;
    for (const float damage : {INFINITY, -INFINITY, std::nanf("")}) {
        Setting setting = random_setting(kernels, {8, true}, 1);
        setting.heads = {2, 2, 2, width, width};
        setting.pages = {30, 20};
        setting.layout = Layout::HeadMajor;
        setting.question = random_question(setting, *std::make_unique<Random>(1));
        setting.question.positions = {39, 40};
        setting.question.window = 0;
        setting.question.shifts = {0};
        setting.splits = {{0, 0, 50}};
        Random random(1);
        Cache cache(kernels.stored, setting.heads, setting.pages, setting.layout, random);
        // Element 5 of token 40, which is the tenth of the second page, of KV head 1.
        const kvfs::Page& page = cache.pages[1];
        std::memcpy(const_cast<uint8_t*>(page.v) + page.v_head_stride + 10 * page.v_token_stride +
                        5 * sizeof(float), &damage, sizeof(float));
        const Runner runner(kernels, cache, setting.question, setting.splits, 1);
        const std::vector<float> out = runner.finish(runner.attend(setting.variant), nullptr);
        for (size_t at = 0; at < out.size(); ++at) {
            const size_t row = at / width;
            const bool sees = row / 4 == 1 && row % 4 / 2 == 1 && at % width == 5;
            if (std::isfinite(out[at]) == sees) {
                fail("damaged", "%g in V: element %zu of the result is %g", damage, at, out[at]);
            }
        }
    }
}

}  // namespace cases

int main(int count, char** arguments) {
    if (count != 6) shim::fail("cases SEEDS DTYPE WIDTH MODULE COMMON");
    const cases::Kernels kernels = {cases::stored(arguments[2]),
                                    static_cast<unsigned>(std::atoi(arguments[3])),
                                    cases::Module(arguments[4]), cases::Module(arguments[5])};
    cases::check_conversion(kernels);
    cases::check_variants(kernels, std::strtoull(arguments[1], nullptr, 10));
    cases::check_merge(kernels);
    cases::check_damaged(kernels);
    return 0;
}
