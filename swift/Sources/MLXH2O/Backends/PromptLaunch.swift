import MLX

/// Launches of the kernels that score prompts: two passes over the keys, and no logits in memory.
struct PromptLaunch {
    // Rows and keys of a threadgroup, and its threads, as in logit_tile.h.
    private static let tile = 64
    private static let threads = 256

    static let logSumExp = KernelLaunch.Interface("prompt_lse")
    static let mass = KernelLaunch.Interface("prompt_mass")

    private let lengths: [Int]
    private let inputs: [String: MLXArray]
    private let template: [(String, any KernelTemplateArg)]
    /// `[B, Hq, L]`.
    private let queryShape: [Int]
    private let massShape: [Int]

    /// Whether the kernels are written for these operands.
    static func supports(_ call: AttentionCall) -> Bool {
        if case .joined = call.keys { return false }
        let keys = call.keys.shape
        return Tiling.widths.contains(keys.last!) && keys[keys.count - 2] > 0
            && call.queries.dtype == call.keys.dtype
    }

    /// What both passes are given.
    ///
    /// - Parameters:
    ///   - call: Queries, keys, scale and mask, as for ``AttentionLaunch``.
    ///   - ranges: Where each head's slots lie, of keys `[B, S, D]`.
    init(_ call: AttentionCall, ranges: Ranges? = nil) {
        let q = call.queries
        let (B, Hq, L, D) = (q.dim(0), q.dim(1), q.dim(2), q.dim(3))
        var keys = call.keys
        if let ranges {
            (lengths, keys) = (ranges.lengths, keys.withHeadAxis)
            massShape = [B, lengths.reduce(0, +)]
        } else {
            lengths = Array(repeating: keys.shape[2], count: keys.shape[1])
            massShape = Array(keys.shape[0 ..< 3])
        }
        let mask = call.mask.launched(queries: L, slots: lengths.max()!)
        let work = Work(lengths: lengths, ranges: ranges, block: nil)
        var inputs = [
            "params": MLXArray(work.parameters(queries: L, maskColumns: mask.columns)),
            "factors": MLXArray([call.scale]), "queries": q,
        ]
        inputs.merge(keys.buffers("keys")) { $1 }
        inputs["mask"] = call.mask.buffer([B, Hq, L, mask.columns])
        self.inputs = inputs
        template =
            [("D", D)] + keys.packing("K") + [("G", Hq / lengths.count), ("MASK", mask.kind)]
        queryShape = [B, Hq, L]
    }

    /// Log-sum-exp `[B, Hq, L]` float32 of each query's logits, minus infinity if it sees nothing.
    func logSumExp() -> MLXArray {
        let rows = queryShape[1] / lengths.count * queryShape[2]
        return launch(Self.logSumExp, [:], .init("lse", queryShape, .float32), along: rows)
    }

    /// Mass that the queries give each slot, `[B, Hk, N]` float32, or `[B, slots]` with ranges.
    ///
    /// - Parameter logSumExp: `[B, Hq, L]` over all columns that answered.
    func mass(_ logSumExp: MLXArray) -> MLXArray {
        launch(
            Self.mass, ["lse": logSumExp.contiguous()], .init("mass", massShape, .float32),
            along: lengths.max()!)
    }

    /// One threadgroup per tile of what is counted along x.
    private func launch(
        _ interface: KernelLaunch.Interface, _ more: [String: MLXArray],
        _ output: KernelLaunch.Output, along x: Int
    ) -> MLXArray {
        KernelLaunch(
            interface: interface, inputs: inputs.merging(more) { $1 }, outputs: [output],
            template: template,
            threadgroups: ((x + Self.tile - 1) / Self.tile, lengths.count, queryShape[0]),
            threads: Self.threads
        ).run()[output.name]!
    }
}
