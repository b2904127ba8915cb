// Random passes of tiny decoders: rows and cache pages of a sequence have the same bits alone in one thread and among others
// in more, in one pass and in many, in clean memory and in memory with old numbers.
#pragma once

#include <algorithm>

#include "chains.hpp"
#include "decoder.hpp"

// A decoder with options taken at random.
template <Kind cache, int weights>
class RandomDecoder : public TinyDecoder<BF16, cache, weights> {
   public:
    using Base = TinyDecoder<BF16, cache, weights>;
    using Pages = typename Base::Pages;
    using Row = typename Base::Row;

    RandomDecoder(const Packing& packing, const Library& library, Random& random) : Base(packing, library) {
        const int windows[] = {0, 0, 24, 70, -16};
        for (LayerSpec& layer : this->layers) {
            AttentionSpec& attention = layer.attention;
            attention.window = windows[random.below(5)];
            if (random.below(2)) attention.sinks = this->norm(Base::HEADS);
            if (random.below(2)) attention.q_norm = attention.k_norm = {};
            if (random.below(4) == 0) attention.rope = -1;
            layer.parallel = random.below(2);
        }
        this->ropes[0].paired = random.below(2);
        this->m.score_cap = random.below(2) ? 5.0f : 0.0f;
    }

    // Pages as earlier sequences may have left them: keys of float caches are NaN, other numbers finite and huge.
    Pages used_pages() const {
        Pages made = this->pages();
        constexpr int64_t half = PAGE * (Base::HEAD / per_word(cache) + (cache == INT8));
        for (Word* page : made)
            for (int64_t i = 0; i < 2 * Base::LAYERS * Base::KV_HEADS * half; i++)
                page[i] = cache != INT8 && i / half % 2 == 0 ? 0x7fc07fc0 : 0x7f7f7f7f;
        return made;
    }

    static std::vector<Word> words_of(const Pages& pages) {
        std::vector<Word> all;
        constexpr int64_t count = 2 * Base::LAYERS * Base::KV_HEADS * PAGE * (Base::HEAD / per_word(cache) + (cache == INT8));
        for (const Word* page : pages) all.insert(all.end(), page, page + count);
        return all;
    }

    // Greedy chains of `limits` tokens behind the rows of several sequences.
    std::vector<std::vector<int32_t>> chains(const std::vector<const Pages*>& sequences, const std::vector<int32_t>& sequence_from,
                                             const std::vector<Row>& rows, const std::vector<int32_t>& limits, int threads) {
        const int count = (int)sequences.size(), longest = *std::max_element(limits.begin(), limits.end());
        typename Base::Plan plan(sequences, sequence_from, rows);
        const std::vector<float> floors(count * longest, 0.0f), bases(count, 1.0f), slopes(count, 0.0f);
        std::vector<int32_t> tokens(count * longest), counts(count), tried(count);
        std::vector<float> probabilities(count * longest);
        const std::vector<SamplerSpec> samplers(count, SamplerSpec{});
        const std::vector<TreeSpec> trees(count, TreeSpec{});
        std::vector<int32_t> parents(count * longest);
        ChainSpec c = {};
        c.limits = limits.data(), c.floors = floors.data(), c.bases = bases.data(), c.slopes = slopes.data();
        c.tokens = tokens.data(), c.probabilities = probabilities.data(), c.counts = counts.data(), c.tried = tried.data();
        c.samplers = samplers.data(), c.trees = trees.data(), c.parents = parents.data(), c.longest = longest, c.buckets = 1, c.vocab = c.width = Base::VOCAB;
        check(!this->template of<int32_t(const ModelSpec*, const BatchSpec*, const ChainSpec*, void*, int)>("foretoken_chains")(
                  &this->m, &plan.batch, &c, this->workspace, threads), "chains");
        std::vector<std::vector<int32_t>> all;
        for (int i = 0; i < count; i++) {
            all.push_back({tokens.begin() + i * longest, tokens.begin() + i * longest + counts[i]});
            const int32_t* bits = (const int32_t*)&probabilities[i * longest];
            all.back().insert(all.back().end(), bits, bits + counts[i]);
        }
        return all;
    }
};

// The rows of a sequence: those that are cached first, and then the end of the text and a draft behind it, with logits.
template <class Row>
struct RandomSequence {
    std::vector<Row> cached, pending;
    std::vector<int> parents;  // of the draft's nodes; -1: the text
    int text = 0;              // tokens

    RandomSequence(Random& random, int vocabulary) {
        const int count = random.below(130), ending = 1 + random.below(4), nodes = random.below(14);
        text = count + ending;
        for (int i = 0; i < count; i++) cached.push_back({random.below(vocabulary), i, i, i + 1, {}, true});
        for (int i = count; i < text; i++) pending.push_back({random.below(vocabulary), i, i, i + 1});
        const bool chain = random.below(3) == 0;
        for (int node = 0; node < nodes; node++) {
            parents.push_back(chain ? node - 1 : random.below(node + 1) - 1);
            Row row{random.below(vocabulary), text, text + node, chain ? text + node + 1 : text};
            if (parents.back() >= 0) {
                const Row& parent = pending[ending + parents.back()];
                row.position = parent.position + 1, row.branches = parent.branches;
            }
            if (!chain) row.branches.push_back(text + node);
            pending.push_back(row);
        }
    }

    // The cache rows of a random path from the text.
    std::vector<int32_t> path(Random& random) const {
        std::vector<int32_t> rows;
        for (int node = parents.empty() ? -1 : random.below((int)parents.size()); node >= 0; node = parents[node])
            rows.insert(rows.begin(), text + node);
        return rows;
    }
};

template <class Decoder>
class RandomPasses {
   public:
    using Pages = typename Decoder::Pages;
    using Row = typename Decoder::Row;

    RandomPasses(Decoder& decoder, Random& random, const std::string& name) : decoder(decoder), random(random), name(name) {
        const int count = 1 + random.below(5);
        for (int i = 0; i < count; i++) sequences.emplace_back(random, Decoder::VOCAB), shared.push_back(decoder.used_pages());
    }

    void run() {
        fill();
        std::vector<std::vector<float>> logits;
        for (int i : order()) going.push_back(i);
        together([&](int i) { return sequences[i].pending; }, logits);
        std::vector<Pages> alone;
        for (const auto& each : sequences) {
            const size_t i = alone.size();
            for (const Pages& pages : {decoder.pages(), decoder.used_pages()}) {
                if (!each.cached.empty()) decoder.run(pages, each.cached);
                check(decoder.run(pages, each.pending) == logits[i], name, ": logits of sequence ", (int)i);
                if (alone.size() == i) alone.push_back(pages);
                else alone[i] = pages;
            }
            check(Decoder::words_of(alone[i]) == Decoder::words_of(shared[i]), name, ": pages of sequence ", (int)i);
        }
        accept(alone);
    }

   private:
    Decoder& decoder;
    Random& random;
    const std::string& name;
    std::vector<RandomSequence<Row>> sequences;
    std::vector<Pages> shared;  // of the sequences that share passes
    std::vector<int> going;

    int threads() { return 1 + random.below(5); }

    std::vector<int> order() {
        std::vector<int> all;
        for (int i = 0; i < (int)sequences.size(); i++) all.insert(all.begin() + random.below(i + 1), i);
        return all;
    }

    // Writes the cached rows in passes of random parts of random sequences.
    void fill() {
        std::vector<size_t> done(sequences.size());
        for (bool all = false; !all;) {
            all = true, going.clear();
            std::vector<size_t> until = done;
            for (int i : order()) {
                const size_t size = sequences[i].cached.size();
                if (done[i] == size) continue;
                all = false;
                if (random.below(3)) going.push_back(i), until[i] = std::min(size, done[i] + 1 + random.below(50));
            }
            std::vector<std::vector<float>> none;
            together([&](int i) {
                const auto& rows = sequences[i].cached;
                return std::vector<Row>(rows.begin() + done[i], rows.begin() + until[i]);
            }, none);
            done = until;
        }
        going.clear();
    }

    // One pass over rows of the sequences in `going`. Returns the logits of each.
    template <class F>
    void together(F rows_of, std::vector<std::vector<float>>& logits) {
        std::vector<const Pages*> pages;
        std::vector<int32_t> from{0};
        std::vector<Row> rows;
        for (int i : going) {
            const std::vector<Row> some = rows_of(i);
            rows.insert(rows.end(), some.begin(), some.end());
            pages.push_back(&shared[i]), from.push_back((int32_t)rows.size());
        }
        if (rows.empty()) return;
        const std::vector<float> all = decoder.run(pages, from, rows, threads());
        logits.resize(sequences.size());
        if (all.empty()) return;
        for (size_t g = 0; g < going.size(); g++)
            logits[going[g]].assign(all.begin() + from[g] * Decoder::VOCAB, all.begin() + from[g + 1] * Decoder::VOCAB);
    }

    // Accepts a path of each draft, and drafts chains behind it, in a call for all and in one for each.
    void accept(const std::vector<Pages>& alone) {
        std::vector<std::vector<int32_t>> one;
        std::vector<const Pages*> pages;
        std::vector<int32_t> from{0}, limits;
        std::vector<Row> rows;
        for (int i : order()) {
            const RandomSequence<Row>& each = sequences[i];
            const std::vector<int32_t> path = each.path(random);
            if (!path.empty()) decoder.move(shared[i], each.text, path), decoder.move(alone[i], each.text, path);
            check(Decoder::words_of(alone[i]) == Decoder::words_of(shared[i]), name, ": moved rows of sequence ", i);
            const int at = each.text + (int)path.size();
            rows.push_back({random.below(Decoder::VOCAB), at, at, at + 1});
            pages.push_back(&shared[i]), from.push_back((int32_t)rows.size()), limits.push_back(1 + random.below(8));
            one.push_back(decoder.chains({&alone[i]}, {0, 1}, {rows.back()}, {limits.back()}, 1)[0]);
        }
        check(decoder.chains(pages, from, rows, limits, threads()) == one, name, ": chains");
        for (size_t i = 0; i < sequences.size(); i++)
            check(Decoder::words_of(alone[i]) == Decoder::words_of(shared[i]), name, ": pages after chains");
    }
};

// Runs passes of `count` random models, if the library has the kernels.
template <Kind cache, int weights>
void check_random_passes(const Packing& packing, const Library& library, int seed, int count) {
    const auto kinds = library.of<uint32_t()>("foretoken_kinds");
    if (!(kinds() >> weights & 1) || !library.symbol(("foretoken_run_" + std::to_string((int)cache)).c_str())) return;
    const std::string name = "random passes, weights of kind " + std::to_string(weights) + ", cache of kind " + std::to_string((int)cache);
    for (int i = 0; i < count; i++) {
        Random random{(uint64_t)(seed + i) * 0x9E3779B97F4A7C15u};
        RandomDecoder<cache, weights> decoder(packing, library, random);
        for (int batch = 0; batch < 4; batch++) RandomPasses<RandomDecoder<cache, weights>>(decoder, random, name).run();
    }
    std::printf("%s: %d models\n", name.c_str(), count);
}
