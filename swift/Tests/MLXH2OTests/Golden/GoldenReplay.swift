import Foundation
import MLX
import MLXLMCommon

@testable import MLXH2O

/// What each group of golden cases is, as docs/reference/golden.md says.
enum GoldenReplay {
    static func run(_ golden: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        switch golden.group {
        case "attention": try attention(golden, inputs)
        case "quantized": try quantized(golden, inputs)
        case "remainder": try remainder(golden)
        case "accumulate": try accumulate(golden, inputs)
        case "selection": try selection(golden, inputs)
        case "trajectory", "framed", "turns", "filling", "returning": try trajectory(golden, inputs)
        case "twice": try twice(golden, inputs)
        case "model": try model(golden, inputs)
        default: throw GoldenError("Unknown group \(golden.group).")
        }
    }

    // MARK: 1 and 2

    private static func attention(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        let (B, Hk, N) = (p.int("batch"), p.int("kv_heads"), p.int("keys"))
        let result = try scaledDotProductAttentionWithScores(
            queries: queries(p),
            keys: p.tensor(.k, [B, Hk, N, p.int("key_width")], dtype: p.dtype),
            values: p.tensor(.v, [B, Hk, N, p.int("value_width")], dtype: p.dtype),
            scale: p.scale, mask: mask(p, inputs), sinks: sinks(p))
        return [
            "out": result.output, "scores": result.scores, "lse": result.logSumExp,
            "mass": try EngineSteps.attentionMass(
                result.scores, logSumExp: result.logSumExp, heads: Hk),
        ]
    }

    private static func quantized(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        let result = try quantizedScaledDotProductAttentionWithScores(
            queries: queries(p),
            quantizedKeys: (inputs["k_w"]!, inputs["k_s"]!, inputs["k_b"]!),
            quantizedValues: (inputs["v_w"]!, inputs["v_s"]!, inputs["v_b"]!),
            scale: p.scale, mask: mask(p, inputs), sinks: sinks(p), groupSize: p.int("group_size"),
            keyBits: p.int("k_bits"), valueBits: p.int("v_bits"))
        return ["out": result.output, "scores": result.scores, "lse": result.logSumExp]
    }

    /// Keys and values of a "quantized" case, packed here, by their names in the file.
    static func packed(_ p: GoldenCase) throws -> Arrays {
        let slots = [p.int("batch"), p.int("kv_heads"), p.int("keys")], group = p.int("group_size")
        func packed(_ which: Tensor, _ letter: String, _ width: String) throws -> Arrays {
            let rows = p.tensor(which, slots + [p.int(width)], dtype: p.dtype)
            let packed = try PackedRows(
                packing: rows, bits: p.int(letter + "_bits"), groupSize: group)
            return [
                letter + "_w": packed.words, letter + "_s": packed.scales,
                letter + "_b": packed.biases,
            ]
        }
        return try packed(.k, "k", "key_width").merging(packed(.v, "v", "value_width")) { $1 }
    }

    private static func queries(_ p: GoldenCase) -> MLXArray {
        p.tensor(
            .q, [p.int("batch"), p.int("query_heads"), p.int("queries"), p.int("key_width")],
            dtype: p.dtype)
    }

    private static func sinks(_ p: GoldenCase, layer: Int = 0) -> MLXArray? {
        p["sinks"].bool! ? p.tensor(.sinks, [p.int("query_heads")], layer: layer) : nil
    }

    private static func mask(
        _ p: GoldenCase, _ inputs: Arrays
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        switch p.text("mask") {
        case "none": .none
        case "causal": .causal
        default: .array(inputs["mask"]!)
        }
    }

    // MARK: 3

    private static func remainder(_ p: GoldenCase) throws -> Arrays {
        let (B, H) = (p.int("batch"), p.int("kv_heads"))
        let (D, Dv) = (p.int("key_width"), p.int("value_width"))
        func statistics(count: Int, variancePower: Int) -> H2ORemainder {
            H2ORemainder([
                MLXArray.full([B, H], values: MLXArray(Float(count))),
                p.tensor(.meanKey, [B, H, D]),
                square(p.tensor(.variance, [B, H, D]))
                    * Float(sign: .plus, exponent: variancePower, significand: 1),
                p.tensor(.meanValue, [B, H, Dv]),
            ])
        }
        switch p.text("kind") {
        case "fold":
            let rows = p["rows"].array!.map { $0.int! }, T = rows.reduce(0, +)
            let keys = p.tensor(.k, [B, H, T, D], power: p.int("power"))
            let values = p.tensor(.v, [B, H, T, Dv], power: p.int("power"))
            let counted = p.hashed(.weight, B * H * T).map { Float($0 >= 1 << 63 ? 1 : 0) }
            let weights = p["weighted"].bool! ? MLXArray(counted, [B, H, T]) : nil
            var first = 0
            var folded = try EngineSteps.emptyRemainder(
                batch: B, heads: H, keyWidth: D, valueWidth: Dv)
            for count in rows {
                let part = first ..< first + count
                folded = try EngineSteps.fold(
                    folded, keys: keys[0..., 0..., part], values: values[0..., 0..., part],
                    weights: weights?[0..., 0..., part])
                first += count
            }
            return Dictionary(uniqueKeysWithValues: zip(H2ORemainder.names, folded.arrays))
        case "column":
            let q = p.tensor(
                .q, [B, p.int("query_heads"), p.int("queries"), D], power: p.int("q_power"))
            let remainder = statistics(
                count: p.int("count"), variancePower: p.int("variance_power"))
            let saturation = p.numbers("saturation") ?? [H2ORemainder.saturation]
            return [
                "logit": try EngineSteps.column(
                    remainder, queries: q, scale: p.scale, saturation: saturation)
            ]
        case "join":
            let shape = [B, p.int("query_heads"), p.int("queries")]
            func logits(_ which: Tensor, _ kind: String) -> MLXArray {
                let numbers = p.tensor(which, shape)
                switch kind {
                case "nothing": return MLXArray.full(shape, values: MLXArray(-Float.infinity))
                case "far above": return numbers + Float(200)
                default: return numbers
                }
            }
            var out = p.tensor(.v, shape + [Dv], dtype: p.dtype)
            if p.text("lse") == "nothing" { out = MLXArray.zeros(out.shape, dtype: p.dtype) }
            let joint = try EngineSteps.join(
                out, logits(.lse, p.text("lse")), logits: logits(.logit, p.text("logit")),
                values: p.tensor(.meanValue, [B, H, Dv]))
            return ["out": joint.out, "lse": joint.lse]
        default:
            let rows = try EngineSteps.plainRows(
                statistics(count: 40, variancePower: 0), p.int("rows"))
            return ["keys": rows.keys, "values": rows.values]
        }
    }

    private static func accumulate(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        [
            "scores": try EngineSteps.accumulate(
                p.policy(), inputs["scores"]!, logits: inputs["logits"]!, lse: inputs["lse"]!)
        ]
    }

    private static func selection(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        let policy = try p.policy(), options = policy.options
        let (B, H, N) = (p.int("batch"), p.int("kv_heads"), p.int("slots"))
        let places = inputs["positions"]!, offset = N + p.int("evicted")
        let slots = EngineSteps.Slots(
            keys: p.tensor(.k, [B, H, N, p.int("key_width")]),
            values: p.tensor(.v, [B, H, N, p.int("value_width")]), positions: places,
            scores: inputs["scores"],
            evictedMeanKey: p.tensor(.meanKey, [B, H, p.int("key_width")]),
            offset: offset, evicted: p.int("evicted"))
        let mayGo = try EngineSteps.evictable(
            slots, sink: options.sink, recent: policy.recentSlots(N))
        func victims(_ priority: MLXArray) throws -> MLXArray {
            try EngineSteps.victims(
                priority, slots, evictable: mayGo, count: p.int("count"), unit: options.unit)
        }
        switch p.text("kind") {
        case "kept":
            let priority = try EngineSteps.priority(
                policy, slots, evictable: mayGo, prompt: .some(inputs["window_mass"]))
            let kept = try EngineSteps.kept(
                priority, slots, evictable: mayGo, count: p.int("count"), unit: options.unit)
            return ["priority": priority, "kept": kept]
        case "extremes":
            return ["victims": try victims(inputs["priority"]!)]
        default:
            let priority = try EngineSteps.priority(policy, slots, evictable: mayGo)
            return ["priority": priority, "victims": try victims(priority)]
        }
    }

    // MARK: 4

    /// - Parameter inputs: Centres and scales `[layers, Hk, D]` of group "framed".
    private static func trajectory(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        let (budgets, filling) = slots(p)
        let files = try files(p, layers: budgets.count)
        defer { files.map { try? FileManager.default.removeItem(at: $0.folder) } }
        let caches = try caches(p, inputs, files: files?.layers)
        let mostSlots = (budgets + filling.flatMap(\.budgets)).joined().max()!
        let calls = p["calls"].array!.flatMap { call in
            Array(repeating: call.array![0].int!, count: call.array![1].int!)
        }
        let recorded = p["recorded"].array!.map { $0.int! }
        let chunks = p["chunks"].array!.map { $0.int! }
        let (B, T) = (p.int("batch"), calls.reduce(0, +))
        func streams(_ which: Tensor, _ heads: String, _ width: String) -> [MLXArray] {
            caches.indices.map {
                p.tensor(which, [B, p.int(heads), T, p.int(width)], layer: $0)
            }
        }
        let q = streams(.q, "query_heads", "key_width")
        let k = streams(.k, "kv_heads", "key_width"), v = streams(.v, "kv_heads", "value_width")
        var outs: [MLXArray] = [], kept: [MLXArray] = [], scores: [MLXArray] = []
        var results = Arrays()
        for (call, L) in calls.enumerated() {
            for cache in caches { try begin(call, of: p, cache) }
            let layers = caches.enumerated().map { layer, cache in
                let part = cache.offset ..< cache.offset + L
                return h2oAttention(
                    queries: q[layer][0..., 0..., part], keys: k[layer][0..., 0..., part],
                    values: v[layer][0..., 0..., part], cache: cache, scale: p.scale,
                    mask: cache.makeMask(n: L, windowSize: nil, returnArray: false),
                    sinks: sinks(p, layer: layer))
            }
            eval(layers)
            if chunks.contains(call) { results["chunk.\(call)"] = stacked(layers) }
            guard recorded.contains(call) else { continue }
            outs.append(stacked(layers.map { $0[0..., 0..., L - 1] }))
            let most = max(caches.map(\.physicalLength).max()!, mostSlots)
            kept.append(stacked(caches.map { held($0, most) }))
            if caches[0].policy.needsAttention {
                scores.append(
                    stacked(
                        caches.map { cache in
                            MLXArray(
                                try! cache.keptScores().flatMap {
                                    $0.flatMap {
                                        $0 + Array(repeating: 0, count: most - $0.count)
                                    }
                                }, [B, p.int("kv_heads"), most])
                        }))
            }
        }
        results["out"] = stacked(outs)
        results["kept"] = stacked(kept)
        if !scores.isEmpty { results["scores"] = stacked(scores) }
        if caches[0].settings.remembers { results.merge(try remainders(caches)) { $1 } }
        if files != nil {
            for case let failure? in caches.map(\.spillFailure) { throw GoldenError(failure) }
            results["returned"] = MLXArray(caches.map { Int32($0.rowsReturned) })
        }
        return results
    }

    private typealias LaterSlots = (beyond: Int, budgets: [[Int]])

    /// Slots of each layer and head, and those that follow.
    private static func slots(_ p: GoldenCase) -> (budgets: [[Int]], filling: [LaterSlots]) {
        let filling = (p["cache"]["filling"]?.array ?? []).map {
            (beyond: $0.array![0].int!, budgets: integers($0.array![1]))
        }
        return (integers(p["cache"]["budgets"]!), filling)
    }

    /// - Parameter inputs: Centres and scales `[layers, Hk, D]`, or nothing.
    private static func caches(
        _ p: GoldenCase, _ inputs: Arrays, files: [SpilledLayer]? = nil
    ) throws -> [H2OKVCache] {
        let (budgets, filling) = slots(p)
        return try budgets.enumerated().map { layer, budgets in
            let parts = FrameArrays.names.compactMap { inputs[$0]?[layer] }
            let frame = parts.isEmpty ? nil : FrameArrays(centre: parts[0], scale: parts[1])
            return try cache(
                p, budgets: budgets, frame: frame.map { try H2OFrame($0) },
                filling: filling.map {
                    Stage(beyond: $0.beyond, budgets: $0.budgets[layer])
                }, file: files?[layer])
        }
    }

    /// The parts of a case's caches in the file of their rows (group "returning"), and its folder.
    private static func files(
        _ p: GoldenCase, layers: Int
    ) throws -> (folder: URL, layers: [SpilledLayer])? {
        guard let returns = p.parameters["returns"] else { return nil }
        func number(_ name: String) -> Int { returns[name]!.int! }
        let folder = FileManager.default.temporaryDirectory
            .appendingPathComponent(UUID().uuidString)
        let spill = try H2OSpill(
            folder: folder, every: number("every"), window: number("window"),
            pages: number("pages"), rows: number("rows"), room: returns["room"]!.double!,
            ahead: number("ahead"))
        let file = try EngineSpill(spill, layers: layers)
        let heads = integers(p["returning"])
        return (
            folder,
            heads.enumerated().map { layer, heads in
                SpilledLayer(spill: file, layer: layer, returning: heads.map { $0 == 1 })
            }
        )
    }

    /// Pin what is pinned before a call, and begin its turn, where the case says so.
    private static func begin(_ call: Int, of p: GoldenCase, _ cache: H2OKVCache) throws {
        let spans = integers(p.parameters["pins"] ?? .array([])).filter { $0[0] == call }
        if !spans.isEmpty { try cache.pin(spans.map { $0[1] ..< $0[2] }) }
        let turns = p.parameters["turn_calls"]?.array ?? []
        for (turn, carry) in zip(turns, p.numbers("carries") ?? []) where turn.int! == call {
            try cache.newTurn(carry: Double(carry))
        }
    }

    private static func cache(
        _ p: GoldenCase, budgets: [Int], frame: H2OFrame?, filling: [Stage], file: SpilledLayer?
    ) throws -> H2OKVCache {
        let settings = p["cache"], bits = settings["bits"]?.int
        let made = try CacheSettings(
            budgets, policy: p.policy(), remainder: settings["remainder"]?.bool ?? true,
            attends: settings["attending"]?.bool ?? true,
            packing: H2OPacking(
                keyBits: settings["k_bits"]?.int ?? bits,
                valueBits: settings["v_bits"]?.int ?? bits,
                groupSize: settings["group_size"]?.int ?? 64,
                recentBits: settings["recent_bits"]?.int),
            undo: 0, frame: frame,
            saturation: settings.numbers("saturation") ?? [H2ORemainder.saturation],
            rope: CacheSettings.rope(settings["rope"]), filling: filling)
        return try H2OKVCache(made, PressureShare(nil, nil), file: file)
    }

    /// Positions `[B, H, most]`, ascending, then -1.
    private static func held(_ cache: H2OKVCache, _ most: Int) -> MLXArray {
        let kept = try! cache.keptPositions()
        let padded = kept.flatMap {
            $0.flatMap { $0.map(Int32.init) + Array(repeating: -1, count: most - $0.count) }
        }
        return MLXArray(padded, [kept.count, kept[0].count, most])
    }

    private static func integers(_ lists: H2OSettingValue) -> [[Int]] {
        lists.array!.map { $0.array!.map { $0.int! } }
    }

    // MARK: 5

    private static func twice(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        guard p.text("kind") == "reading" else {
            let counts = try EngineSteps.sharedOut(
                inputs["worths"]!, whole: p.int("whole"), own: p["own"].array!.map { $0.int! })
            return ["counts": MLXArray(counts)]
        }
        let caches = try caches(p, inputs), B = p.int("batch"), heads = p.int("kv_heads")
        let (prompt, chunk, request) = (p.int("prompt"), p.int("chunk"), p.int("request"))
        let lengths = stride(from: 0, to: prompt, by: chunk).map { min(chunk, prompt - $0) }
        let before = (p["calls"].array ?? []).flatMap { call in
            Array(repeating: call.array![0].int!, count: call.array![1].int!)
        }
        let steps = Array(repeating: 1, count: p.int("steps"))
        let again = lengths.map { $0 + request }
        let T = (before + lengths + again + steps).reduce(0, +)
        let streams = caches.indices.map { layer in
            let shape = [B, heads, T]
            return (
                q: p.tensor(.q, [B, p.int("query_heads"), T, p.int("key_width")], layer: layer),
                k: p.tensor(.k, shape + [p.int("key_width")], dtype: p.dtype, layer: layer),
                v: p.tensor(.v, shape + [p.int("value_width")], dtype: p.dtype, layer: layer)
            )
        }
        var first = 0
        func attend(_ L: Int, _ layers: [any KVCache]) -> MLXArray {
            let part = first ..< first + L
            first += L
            let outs = layers.indices.map { layer in
                h2oAttention(
                    queries: streams[layer].q[0..., 0..., part],
                    keys: streams[layer].k[0..., 0..., part],
                    values: streams[layer].v[0..., 0..., part], cache: layers[layer],
                    scale: p.scale, mask: .causal, sinks: sinks(p, layer: layer))
            }
            eval(outs)
            return stacked(outs)
        }
        for L in before { _ = attend(L, caches) }
        let readings = try EngineReadings(
            caches.map { $0.engine! }, length: prompt, room: p.int("room"))
        for L in lengths { _ = attend(L, caches) }
        var results = Arrays()
        for L in again { results["again"] = attend(L, secondReadingCaches(of: caches, readings)) }
        func alike(_ layers: [MLXArray]) -> MLXArray {
            let most = layers.map { $0.dim(2) }.max()!
            return stacked(
                layers.map { rows in
                    var missing = rows.shape
                    missing[2] = most - rows.dim(2)
                    return concatenated([rows, .zeros(missing, dtype: rows.dtype)], axis: 2)
                })
        }
        results["worths"] = alike(
            try caches.indices.map { try EngineSteps.worths(readings, layer: $0) })
        try readings.finish()
        results["budgets"] = stacked(
            caches.map { MLXArray($0.engine!.plan.budgets.map { Int32($0) }) })
        let most = caches.map(\.physicalLength).max()!
        results["kept"] = stacked(caches.map { held($0, most) })
        results["values"] = alike(try caches.map { try EngineSteps.values($0.engine!) })
        if caches[0].settings.remembers {
            results.merge(try remainders(caches)) { $1 }
        }
        if !steps.isEmpty {
            results["out"] = concatenated(steps.map { attend($0, caches) }, axis: 3)
        }
        return results
    }

    /// Statistics of the evicted, `[layers, B, Hk, ...]`.
    private static func remainders(_ caches: [H2OKVCache]) throws -> Arrays {
        var results = Arrays()
        for (i, name) in H2ORemainder.names.enumerated() {
            results["remainder.\(name)"] = stacked(
                try caches.map { try $0.evictedRemainder!.arrays[i] })
        }
        return results
    }

    // MARK: 6

    static let embeddedModel = checkout.appendingPathComponent("python/mlx_h2o/data/recall-4m")

    nonisolated(unsafe) private static let embedded = Result {
        try H2OModels.load(folder: embeddedModel, dtype: .float32)
    }

    private static func model(_ p: GoldenCase, _ inputs: Arrays) throws -> Arrays {
        let model = try embedded.get(), prompt = inputs["prompt"]!
        let caches = try integers(p["slots"]).map {
            try H2OKVCache(
                $0, policy: p.policy(), remainder: p["remainder"].bool!)
        }
        func next(_ tokens: MLXArray) -> MLXArray {
            let logits = model(tokens.reshaped([1, -1]), cache: caches)
            return logits[0, logits.dim(1) - 1]
        }
        func kept() -> MLXArray {
            let most = caches.map(\.physicalLength).max()!
            return stacked(caches.map { held($0, most) })
        }
        var logits = MLXArray(Float(0)), begun = 0
        if let reading = H2OReading(rawValue: p.text("reading")) {
            let tokens = [prompt, inputs["request"]!].map { $0.asArray(Int32.self).map(Int.init) }
            begun = try reading.read(
                tokens[0], by: model, into: caches, request: tokens[1], chunk: p.int("prefill")
            ).tokens
        }
        for first in stride(from: begun, to: prompt.size, by: p.int("prefill")) {
            logits = next(prompt[first ..< min(first + p.int("prefill"), prompt.size)])
            eval(logits)
        }
        let afterPrompt = kept()
        var tokens: [Int32] = []
        while true {
            tokens.append(argMax(logits, axis: -1).item(Int32.self))
            if tokens.count == p.int("tokens") { break }
            logits = next(MLXArray([tokens.last!]))
        }
        return [
            "tokens": MLXArray(tokens), "kept.prompt": afterPrompt, "kept": kept(),
            "logits": logits,
        ]
    }
}
