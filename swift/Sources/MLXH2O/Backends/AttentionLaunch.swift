import MLX

/// What the attention kernels wrote; nil for what they were not asked for.
///
/// What there is per slot lies head after head. With ranges it is flat: a head's logits are the
/// `[G, L, length]` after those of the heads before it.
struct Attended {
    /// `[B, Hq, L, Dv]` in the queries' dtype.
    let output: MLXArray
    /// `[B, Hq, L]` float32.
    let logSumExp: MLXArray?
    /// `[B, Hq, L, N]` float32, minus infinity where masked; or `[B, G * L * slots]`.
    let logits: MLXArray?
    /// ||k - mean||^2 `[B, Hk, N]` float32; or `[B, slots]`.
    let distances: MLXArray?
}

/// Launches of the attention kernels: a few queries over many slots, reading keys and values once.
struct AttentionLaunch {
    /// What to write besides the output, as in attention_vector.metal.
    enum Export: Int, Comparable {
        case nothing, logSumExp, logits

        static func < (a: Export, b: Export) -> Bool { a.rawValue < b.rawValue }
    }

    static let vector = KernelLaunch.Interface("attention_vector")
    static let merge = KernelLaunch.Interface("attention_merge")
    private static let mergeSimdgroups = 8

    /// The only launch, or the first of two.
    let first: KernelLaunch
    /// Slots of a block where there are two.
    let block: Int?
    /// `[B, Hq, L, Dv]`.
    private let shape: [Int]
    private let heads: Int
    /// N, where all heads have as many slots.
    private let equal: Int?

    /// Whether the kernels are written for these operands.
    static func supports(_ call: AttentionCall) -> Bool {
        if case .joined = call.keys { return false }
        let (keys, values) = (call.keys, call.values)
        return call.queries.dim(2) <= Tiling.mostQueries
            && Tiling.widths.contains(keys.shape.last!)
            && Tiling.widths.contains(values.shape.last!)
            && call.queries.dtype == keys.dtype && keys.dtype == values.dtype
    }

    /// Attention that reads keys and values once and writes what a policy asks for.
    ///
    /// - Parameters:
    ///   - call: At most 8 queries; keys and values are flat, `[B, S, D]` and `[B, S, Dv]`, with
    ///     ranges. An array mask's last column is the last slot's, and slots before its first are
    ///     visible. The seed is not looked at.
    ///   - remainder: Joins as one more column, which lse covers.
    ///   - saturation: Of each KV head's column, `[Hk]` float32; nil is the usual one for all.
    ///   - frameScale: Of the frame that keys and remainder are in, `[Hk, D]` float32.
    ///   - means: `[B, Hk, D]` float32: measure the keys' distances from them.
    ///   - ranges: Where each head's slots lie.
    ///   - export: What to write besides the output.
    ///   - architecture: The GPU's, see ``Tiling``.
    ///   - after: What a kernel wrote that changed keys and values in place: read only after it.
    init(
        _ call: AttentionCall, remainder: Remainder? = nil, saturation: MLXArray? = nil,
        frameScale: MLXArray? = nil, means: MLXArray? = nil, ranges: Ranges? = nil,
        export: Export = .logits, architecture: String, after: MLXArray? = nil
    ) {
        let q = call.queries
        var (k, v) = (call.keys, call.values)
        let (B, Hq, L, D) = (q.dim(0), q.dim(1), q.dim(2), q.dim(3))
        let Dv = v.shape.last!, size = k.dtype.size
        let lengths: [Int]
        if let ranges {
            lengths = ranges.lengths
            (k, v) = (k.withHeadAxis, v.withHeadAxis)
        } else {
            lengths = Array(repeating: k.shape[2], count: k.shape[1])
        }
        let G = Hq / lengths.count, packed = k.isPacked || v.isPacked
        block = Tiling.slotsPerBlock(
            lengths: lengths, group: G, queries: L, keyWidth: D, valueWidth: Dv, itemSize: size,
            architecture: architecture, stored: packed ? k.rowBytes + v.rowBytes : nil)
        let work = Work(lengths: lengths, ranges: ranges, block: block), items = work.items
        let mask = call.mask.launched(queries: L, slots: lengths.max()!)

        var inputs = [
            "params": MLXArray(work.parameters(queries: L, maskColumns: mask.columns)),
            "factors": MLXArray([call.scale]), "queries": q,
        ]
        var rows = [k.buffers("keys"), v.buffers("values")]
        if let remainder { rows.append(Self.buffers(remainder, saturation, lengths.count)) }
        for buffers in rows { inputs.merge(buffers) { $1 } }
        inputs["mask"] = call.mask.buffer([B, Hq, L, mask.columns])
        inputs["sinks"] = call.sinks?.contiguous()
        inputs["frame_scale"] = frameScale?.contiguous()
        inputs["means"] = means?.contiguous()
        inputs["after"] = after

        let export = block == nil ? export : max(export, .logSumExp)
        var outputs = [KernelLaunch.Output("out", [B, items, G, L, Dv], q.dtype)]
        if export >= .logSumExp { outputs.append(.init("lse", [B, items, G, L], .float32)) }
        if export == .logits { outputs.append(.init("logits", [B, G * L * work.slots], .float32)) }
        if means != nil { outputs.append(.init("distances", [B, work.slots], .float32)) }

        let tiles = Tiling(
            keyWidth: D, valueWidth: Dv, group: G, queries: L, itemSize: size, packed: packed)
        first = KernelLaunch(
            interface: Self.vector, inputs: inputs, outputs: outputs,
            template: [("T", k.dtype), ("D", D), ("DV", Dv)] + k.packing("K") + v.packing("V")
                + [("G", G)] + tiles.template + [
                    ("MASK", mask.kind), ("SINKS", call.sinks != nil),
                    ("REMAINDER", remainder != nil), ("DISTANCES", means != nil),
                    ("FRAME", frameScale != nil), ("EXPORT", export.rawValue),
                ],
            threadgroups: (1, items, B * tiles.rowBlocks),
            threads: tiles.simdgroups * KernelLaunch.simdgroup)
        (shape, heads) = ([B, Hq, L, Dv], lengths.count)
        equal = ranges == nil ? lengths[0] : nil
    }

    /// Buffers of the remainder's column.
    private static func buffers(
        _ remainder: Remainder, _ saturation: MLXArray?, _ heads: Int
    ) -> [String: MLXArray] {
        var buffers = remainder.buffers
        buffers["saturation"] =
            saturation ?? MLXArray(Array(repeating: Remainder.saturation, count: heads))
        return buffers
    }

    /// The second pass over the results of blocks.
    private func second(_ partials: MLXArray, _ lses: MLXArray) -> KernelLaunch {
        let (B, L, Dv) = (shape[0], shape[2], shape[3]), rows = shape[1] / heads * L
        return KernelLaunch(
            interface: Self.merge,
            inputs: [
                "params": first.inputs["params"]!, "partials": partials, "partial_lses": lses,
            ],
            outputs: [
                .init("out", [B, heads, rows, Dv], partials.dtype),
                .init("lse", [B, heads, rows], .float32),
            ],
            template: [("DV", Dv), ("SIMDS", Self.mergeSimdgroups)],
            threadgroups: (rows, heads, B),
            threads: Self.mergeSimdgroups * KernelLaunch.simdgroup)
    }

    /// Outputs in the shapes of the operands; what is per slot only when heads are equal.
    func run() -> Attended {
        var written = first.run()
        if block != nil {
            written.merge(second(written["out"]!, written["lse"]!).run()) { $1 }
        }
        var logits = written["logits"], distances = written["distances"]
        if let equal {
            logits = logits?.reshaped(Array(shape[0 ..< 3]) + [equal])
            distances = distances?.reshaped([shape[0], heads, equal])
        }
        return Attended(
            output: written["out"]!.reshaped(shape),
            logSumExp: written["lse"]?.reshaped(Array(shape[0 ..< 3])), logits: logits,
            distances: distances)
    }
}
