import MLX

/// Launches of the attention kernels: a few queries over many slots, reading keys and values once.
struct AttentionLaunch {
    private static let columns = [
        "sinks", "counts", "mean_keys", "var_keys", "mean_values", "means",
    ]
    private static let exports = ["lse", "logits", "distances"]

    static let vector = KernelLaunch.Interface(
        name: "attention_vector",
        inputs: ["params", "factors", "queries"] + Rows.bufferNames("keys")
            + Rows.bufferNames("values") + ["mask"] + columns + ["after"],
        outputs: ["out"] + exports,
        optional: Rows.absentBuffers("keys") + Rows.absentBuffers("values")
            + [
                (
                    "mask",
                    "const device bool* mask = nullptr;\nconst int64_t mask_strides[4] = {0};"
                )
            ] + columns.map { ($0, "const device float* \($0) = nullptr;") } + [("after", "")]
            + exports.map { ($0, "device float* \($0) = nullptr;") })

    static let merge = KernelLaunch.Interface(
        name: "attention_merge", inputs: ["params", "partials", "partial_lses"],
        outputs: ["out", "lse"])
    private static let mergeSimdgroups = 8

    let call: AttentionOperands
    let block: Int?
    /// The only launch, or the first of two.
    let first: KernelLaunch

    /// Whether the kernels are written for these operands.
    static func supports(_ call: AttentionOperands) -> Bool {
        if case .joined = call.keys { return false }
        let (keys, values) = (call.keys, call.values)
        return call.queries.dim(2) <= Tiling.mostQueries
            && Tiling.widths.contains(keys.shape[3]) && Tiling.widths.contains(values.shape[3])
            && call.queries.dtype == keys.dtype && keys.dtype == values.dtype
    }

    init(_ call: AttentionOperands, architecture: String) {
        self.call = call
        let (q, k, v) = (call.queries, call.keys, call.values)
        let (B, Hq, L, D) = (q.dim(0), q.dim(1), q.dim(2), q.dim(3))
        let (Hk, N, Dv) = (k.shape[1], k.shape[2], v.shape[3])
        let (G, size) = (Hq / Hk, k.dtype.size)
        let packed = k.isPacked || v.isPacked
        block = Tiling.slotsPerBlock(
            lengths: Array(repeating: N, count: Hk), group: G, queries: L, keyWidth: D,
            valueWidth: Dv, itemSize: size, architecture: architecture,
            stored: packed ? k.rowBytes + v.rowBytes : nil)
        let work = Work(lengths: Array(repeating: N, count: Hk), block: block)
        var kind = 0, maskColumns = 0
        var inputs = [
            "factors": MLXArray([call.scale, Remainder.saturation]), "queries": q,
        ]
        for buffers in [k.buffers("keys"), v.buffers("values")] { inputs.merge(buffers) { $1 } }
        switch call.mask {
        case .none: break
        case .causal: kind = L == 1 ? 0 : 1
        case .array(let mask):
            kind = 2
            maskColumns = mask.dim(-1) > 1 ? mask.dim(-1) : N
            inputs["mask"] = broadcast(
                mask.reshaped(Array(repeating: 1, count: 4 - mask.ndim) + mask.shape),
                to: [B, Hq, L, maskColumns])
        }
        inputs["params"] = MLXArray(work.parameters(queries: L, maskColumns: maskColumns))
        if let sinks = call.sinks { inputs["sinks"] = sinks.contiguous() }
        let items = work.lines.count
        let tiles = Tiling(
            keyWidth: D, valueWidth: Dv, group: G, queries: L, itemSize: size, packed: packed)
        first = KernelLaunch(
            interface: Self.vector, inputs: inputs,
            outputs: [
                .init(name: "out", shape: [B, items, G, L, Dv], dtype: q.dtype),
                .init(name: "lse", shape: [B, items, G, L], dtype: .float32),
                .init(name: "logits", shape: [B, G * L * work.slots], dtype: .float32),
            ],
            template: [
                ("T", k.dtype), ("D", D), ("DV", Dv),
            ] + k.packing("K") + v.packing("V") + [
                ("G", G), ("QUERIES", tiles.queries),
                ("ROWS", tiles.rows), ("ROW_GROUPS", tiles.rowGroups),
                ("SIMDS", tiles.simdgroups), ("KEYS", tiles.keys), ("MASK", kind),
                ("SINKS", call.sinks != nil), ("REMAINDER", false), ("DISTANCES", false),
                ("EXPORT", 2),
            ],
            threadgroups: (1, items, B * tiles.rowBlocks),
            threads: tiles.simdgroups * KernelLaunch.simdgroup)
    }

    /// The second pass over the results of blocks.
    func second(_ partials: MLXArray, _ lses: MLXArray) -> KernelLaunch {
        let (B, Hq, L) = (call.queries.dim(0), call.queries.dim(1), call.queries.dim(2))
        let (Hk, Dv) = (call.keys.shape[1], call.values.shape[3]), rows = Hq / Hk * L
        return KernelLaunch(
            interface: Self.merge,
            inputs: [
                "params": first.inputs["params"]!, "partials": partials, "partial_lses": lses,
            ],
            outputs: [
                .init(name: "out", shape: [B, Hk, rows, Dv], dtype: partials.dtype),
                .init(name: "lse", shape: [B, Hk, rows], dtype: .float32),
            ],
            template: [("DV", Dv), ("SIMDS", Self.mergeSimdgroups)],
            threadgroups: (rows, Hk, B), threads: Self.mergeSimdgroups * KernelLaunch.simdgroup)
    }

    /// Attention, logits and their log-sum-exp, the remainder's column joined.
    func run() -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        var written = first.run()
        if block != nil {
            written.merge(second(written["out"]!, written["lse"]!).run()) { $1 }
        }
        let (B, Hq, L) = (call.queries.dim(0), call.queries.dim(1), call.queries.dim(2))
        var out = written["out"]!.reshaped([B, Hq, L, call.values.shape[3]])
        var lse = written["lse"]!.reshaped([B, Hq, L])
        if let seed = call.seed { (out, lse) = Reference.join(out, lse, seed) }
        return (out, written["logits"]!.reshaped([B, Hq, L, call.keys.shape[2]]), lse)
    }
}
