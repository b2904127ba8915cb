// Passes of a tiny decoder: rows do not depend on how many a pass has, and a branch of a tree is as a chain.
#pragma once

#include "checks.hpp"

constexpr int FOUR_BITS = GROUPED;  // codes of four bits with scales of 16 bits

// kind: of activations and the embedding; cache: of keys and values; weights: of the matrices.
template <Kind kind, Kind cache, int weights = kind>
class TinyDecoder {
   public:
    static constexpr int HIDDEN = 64, HEADS = 4, KV_HEADS = 2, HEAD = 16, INNER = 96, VOCAB = 96, LAYERS = 2, REACH = 192;

    // Cache pages of one sequence.
    using Pages = std::vector<Word*>;

    // Rows of a pass: token, position, place, prefix, and the visible rows after it.
    struct Row {
        int token, position, place, prefix;
        std::vector<int32_t> branches;
        bool silent = false;  // without logits
    };

    TinyDecoder(const Packing& packing, const Library& library) : packing(packing), library(library) {
        for (LayerSpec& layer : layers) {
            layer = {};
            AttentionSpec& attention = layer.attention;
            layer.attends = 1;
            attention.qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), attention.out = matrix(HIDDEN, HEADS * HEAD);
            layer.dense.up = matrix(2 * INNER, HIDDEN), layer.dense.down = matrix(HIDDEN, INNER);
            layer.norm = {norm(HIDDEN)}, layer.mlp_norm = {norm(HIDDEN)};
            attention.q_norm = {norm(HEAD)}, attention.k_norm = {norm(HEAD)}, attention.kv_heads = KV_HEADS, attention.head_dim = HEAD;
            attention.cache_at = int(&layer - layers) * 2 * KV_HEADS * HEAD, attention.scales_at = int(&layer - layers) * 2 * KV_HEADS;
            layer.dense.inner = INNER, layer.dense.gated = 1, layer.scalar = 1.0f;
        }
        float* turns = packing.zeros<float>(REACH * HEAD);
        for (int i = 0; i < REACH; i++)
            for (int j = 0; j < HEAD / 2; j++) {
                const float t = (float)(i * (j + 1) % 97) / 31;  // the cosine and sine of some angle
                turns[i * HEAD + j] = (1 - t * t) / (1 + t * t), turns[i * HEAD + HEAD / 2 + j] = 2 * t / (1 + t * t);
            }
        ropes[0] = {turns, HEAD / 2, 0};
        m.layers = layers, m.embedding = (const Word*)numbers(VOCAB * HIDDEN), m.norm = {norm(HIDDEN)}, m.head = matrix(VOCAB, HIDDEN);
        m.ropes = ropes, m.layer_count = LAYERS, m.hidden = HIDDEN, m.heads = HEADS;
        m.vocab = VOCAB, m.eps = 1e-6f, m.scale = 0.25f, m.embedding_scale = m.attention_factor = m.mlp_factor = m.gate_factor = m.logit_scale = 1.0f;
        m.logit_cap = 30.0f, m.embedding_kind = kind, m.embedding_rows = VOCAB, m.table_positions = REACH;
        check(!of<int32_t(const ModelSpec*, void**)>("foretoken_open")(&m, &workspace), "a workspace");
    }

    Pages pages() const {
        Pages made;
        const int64_t words = 2 * LAYERS * KV_HEADS * (HEAD / per_word(cache) + (cache == INT8));
        for (int i = 0; i < REACH / PAGE; i++) made.push_back(packing.zeros<Word>(PAGE * words));
        return made;
    }

    // Returns the logits of all rows of one sequence.
    std::vector<float> run(const Pages& pages, const std::vector<Row>& rows, int threads = 1) {
        return run({&pages}, {0, (int32_t)rows.size()}, rows, threads);
    }

    // The arrays of a pass over the rows of several sequences. sequence_from: the first row of each, and the number of rows.
    struct Plan {
        std::vector<int32_t> tokens, positions, places, prefix, from{0}, branches, sequence_from, outputs, counts;
        std::vector<Word* const*> pages;
        std::vector<float> logits;
        BatchSpec batch = {};

        Plan(const std::vector<const Pages*>& sequences, const std::vector<int32_t>& sequence_from, const std::vector<Row>& rows)
            : sequence_from(sequence_from) {
            for (const Pages* each : sequences) pages.push_back(each->data()), counts.push_back((int32_t)each->size());
            for (const Row& row : rows) {
                if (!row.silent) outputs.push_back((int32_t)tokens.size());
                tokens.push_back(row.token), positions.push_back(row.position), places.push_back(row.place);
                prefix.push_back(row.prefix), branches.insert(branches.end(), row.branches.begin(), row.branches.end());
                from.push_back((int32_t)branches.size()), batch.reach = std::max(batch.reach, row.place + 1);
            }
            logits.resize(outputs.size() * VOCAB);
            batch.tokens = tokens.data(), batch.positions = positions.data(), batch.places = places.data();
            batch.prefix = prefix.data(), batch.branch_from = from.data(), batch.branches = branches.data();
            batch.sequence_from = this->sequence_from.data(), batch.pages = pages.data(), batch.page_counts = counts.data();
            batch.branch_count = (int)branches.size(), batch.rows = (int)rows.size(), batch.sequences = (int)sequences.size();
            batch.outputs = outputs.data(), batch.logits = logits.data(), batch.output_count = (int)outputs.size();
        }
        Plan(const Plan&) = delete;
    };

    // Returns the logits of all rows, but for silent ones.
    std::vector<float> run(const std::vector<const Pages*>& sequences, const std::vector<int32_t>& sequence_from,
                           const std::vector<Row>& rows, int threads) {
        Plan plan(sequences, sequence_from, rows);
        constexpr int RANKS = 3;
        std::vector<int32_t> likeliest(plan.outputs.size());
        std::vector<int64_t> ranked(likeliest.size() * RANKS);
        plan.batch.likeliest = likeliest.data(), plan.batch.ranked = ranked.data(), plan.batch.ranks = RANKS;
        check(!of<int32_t(const ModelSpec*, const BatchSpec*, void*, int)>("foretoken_run")(&m, &plan.batch, workspace, threads), "a pass");
        for (size_t i = 0; i < likeliest.size(); i++) {
            check(likeliest[i] == ranked[i * RANKS], "the likeliest token of row ", (int)i);
            for (int rank = 0; rank < RANKS; rank++) check(before(&plan.logits[i * VOCAB], ranked[i * RANKS + rank]) == rank, "rank ", rank, " of row ", (int)i);
        }
        return plan.logits;
    }

    // How many tokens are likelier than this one, those of equal logits in the order of their ids.
    static int before(const float* logits, int64_t token) {
        int count = 0;
        for (int64_t v = 0; v < VOCAB; v++) count += logits[v] > logits[token] || (logits[v] == logits[token] && v < token);
        return count;
    }

    void move(const Pages& pages, int destination, const std::vector<int32_t>& sources) {
        const int32_t status = of<int32_t(const ModelSpec*, Word* const*, int, int, const int32_t*, int)>("foretoken_move")(
            &m, pages.data(), (int)pages.size(), destination, sources.data(), (int)sources.size());
        check(!status, "a move");
    }

    static std::vector<float> last(const std::vector<float>& logits, int rows = 1) {
        return {logits.end() - rows * VOCAB, logits.end()};
    }

   protected:
    const Packing& packing;
    const Library& library;
    void* workspace = nullptr;
    Random random{5};
    LayerSpec layers[LAYERS];
    RopeSpec ropes[1];
    ModelSpec m = {};

    template <class F>
    F* of(const std::string& name) const {
        return library.of<F>((name + "_" + std::to_string((int)cache)).c_str());
    }

    const void* numbers(int64_t count) {
        char* made = packing.zeros<char>(count * 4);
        for (int64_t i = 0; i < count; i++) {
            const float x = random.unit() / 4;
            if (kind == F32) std::memcpy(made + i * 4, &x, 4);
            else std::memcpy(made + i * 2, (const char*)&x + 2, 2);
        }
        return made;
    }

    Matrix matrix(int outputs, int inputs) {
        if constexpr (weights == INT8) return in_bytes(outputs, inputs);
        if constexpr (weights == FOUR_BITS) return in_codes(outputs, inputs);
        const Matrix w = packing.pack((const Word*)numbers((int64_t)outputs * inputs), kind, outputs, inputs / per_word(kind));
        return weights == PACKED ? packing.in_12_bits(w) : w;
    }

    Matrix in_bytes(int outputs, int inputs) {
        std::vector<int8_t> values;
        for (int i = 0; i < outputs * inputs; i++) values.push_back((int8_t)(random.below(255) - 127));
        return packing.of_bytes(values, std::vector<float>(outputs, 0.25f / 127), inputs);
    }

    Matrix in_codes(int outputs, int inputs) {
        Matrix w = {};
        w.kind = FOUR_BITS, w.units = padded(outputs, 32) / 32, w.steps = inputs / 4, w.group = 32, w.record_groups = 1, w.zero = 8;
        w.record_bytes = 32 * 2 + 32 * w.group / 2;
        for (int i = 0; i < 16; i++) w.levels[i] = (uint8_t)i;
        w.data = packing.zeros<Word>(w.units * w.records() * w.record_bytes / 4);
        std::vector<uint8_t> codes;
        for (int i = 0; i < outputs * inputs; i++) codes.push_back((uint8_t)random.below(16));
        const std::vector<float> scales(outputs * w.groups(), 0.03125f);
        const float* of_floats[2] = {scales.data(), nullptr};
        const int8_t* no_parts[2] = {};
        packing.groups(codes.data(), of_floats, no_parts, outputs, inputs, &w, 0, 1, 1);
        return w;
    }

    const float* norm(int count) {
        float* made = packing.zeros<float>(padded(count, 32));
        for (int i = 0; i < count; i++) made[i] = 1.0f + random.unit() / 2;
        return made;
    }
};

template <Kind kind, Kind cache = kind>
void check_decoder(const Packing& packing, const Library& library) {
    using Decoder = TinyDecoder<kind, cache>;
    using Row = typename Decoder::Row;
    const std::string name = std::string("decoder in ") + (kind == F32 ? "float32" : "bfloat16") + (cache == INT8 ? ", int8 cache" : "");
    Decoder decoder(packing, library);
    Random random{6};
    std::vector<Row> rows;
    for (int i = 0; i < 73; i++) rows.push_back({random.below(Decoder::VOCAB), i, i, i + 1});
    const auto pages = decoder.pages();
    const std::vector<float> whole = decoder.run(pages, rows, 3);
    for (float x : whole) check(std::isfinite(x) && std::fabs(x) <= 30.0f, name + " has finite logits");
    report(name, whole);

    const auto others = decoder.pages();
    std::vector<float> joined;
    for (size_t at = 0, count = 1; at < rows.size(); at += count, count = count * 2 % 37) {
        count = std::min(count, rows.size() - at);
        const std::vector<float> part = decoder.run(others, {rows.begin() + at, rows.begin() + at + count}, 1 + at % 2);
        joined.insert(joined.end(), part.begin(), part.end());
    }
    check(joined == whole, name + " in several passes");

    // Row 71 a second time, as the second branch of a tree behind another token; then it is accepted.
    const auto tree = decoder.pages();
    decoder.run(tree, {rows.begin(), rows.begin() + 70});
    const int other = (rows[71].token + 1) % Decoder::VOCAB;
    const std::vector<float> drafted = decoder.run(
        tree, {{rows[70].token, 70, 70, 70, {70}}, {other, 71, 71, 70, {70, 71}}, {rows[71].token, 71, 72, 70, {70, 72}}});
    const std::vector<float> chain(whole.begin() + 71 * Decoder::VOCAB, whole.begin() + 72 * Decoder::VOCAB);
    check(Decoder::last(drafted) == chain, name + " on a branch");
    decoder.move(tree, 70, {70, 72});
    check(decoder.run(tree, {rows[72]}) == Decoder::last(whole), name + " after a branch");
}
