import MLX

/// The kernels of metal/ on a GPU.
struct MetalKernels: Sendable {
    /// Names the GPU ("applegpu_g13s"), by which work is shared out (``Tiling``).
    let architecture: String
    /// Whether a row that a kernel writes into its input is there for the next reader; nil to try it.
    var writesInPlace: Bool?

    // Tried once.
    private static let deviceWritesInPlace = GPUDecoder.triesToWriteInPlace()

    /// Softmax attention `[B, Hq, L, Dv]`, or nil where the definition is as good or all there is.
    func attention(_ call: AttentionCall) -> MLXArray? {
        // Over plain rows MLX's own attention is the best there is.
        let plain = call.seed == nil && !call.keys.isPacked && !call.values.isPacked
        guard !plain, PromptLaunch.supports(call) else { return nil }
        return outputAndLogSumExp(call).output
    }

    /// Attention, its logits `[B, Hq, L, N]` and their log-sum-exp `[B, Hq, L]`, or nil where there
    /// is no kernel for it.
    func attentionWithScores(
        _ call: AttentionCall
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray)? {
        guard AttentionLaunch.supports(call) else { return nil }
        let attended = AttentionLaunch(call, architecture: architecture).run()
        let (output, lse) = joined(attended.output, attended.logSumExp!, call.seed)
        return (output, attended.logits!, lse)
    }

    /// Attention and the mass `[B, Hk, N]` that each key received, or nil where there is no kernel
    /// for it.
    func attentionWithMass(
        _ call: AttentionCall
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray)? {
        guard PromptLaunch.supports(call) else { return nil }
        let (output, lse) = outputAndLogSumExp(call)
        return (output, PromptLaunch(call).mass(lse), lse)
    }

    /// Attention `[B, Hq, L, Dv]` and its log-sum-exp `[B, Hq, L]`, with all columns.
    private func outputAndLogSumExp(
        _ call: AttentionCall
    ) -> (output: MLXArray, logSumExp: MLXArray) {
        if AttentionLaunch.supports(call) {
            let attended = AttentionLaunch(
                call, export: .logSumExp, architecture: architecture
            ).run()
            return joined(attended.output, attended.logSumExp!, call.seed)
        }
        var output = attentionOfPrompt(call), lse = PromptLaunch(call).logSumExp()
        // MLX's attention says nothing about rows that see nothing.
        let seesNothing = (lse .== -Float.infinity).column
        output = which(seesNothing, MLXArray.zeros([], dtype: output.dtype), output)
        if let sinks = call.sinks { lse = logAddExp(lse, sinks.float32.column) }
        return joined(output, lse, call.seed)
    }

    private func joined(
        _ output: MLXArray, _ lse: MLXArray, _ seed: Seed?
    ) -> (output: MLXArray, logSumExp: MLXArray) {
        guard let seed else { return (output, lse) }
        return Reference.join(output, lse, seed)
    }

    /// MLX's attention of many queries; packed rows are dequantized a KV head at a time.
    private func attentionOfPrompt(_ call: AttentionCall) -> MLXArray {
        var call = call
        call.seed = nil
        guard call.keys.isPacked || call.values.isPacked else { return Reference.attention(call) }
        let heads = call.keys.shape[1], group = call.queries.dim(1) / heads
        let outputs = (0 ..< heads).map { head in
            let own = head ..< head + 1, queries = head * group ..< (head + 1) * group
            var part = call
            part.queries = call.queries.sliced(queries, axis: 1)
            part.keys = .plain(call.keys.sliced(own, axis: 1).narrow)
            part.values = .plain(call.values.sliced(own, axis: 1).narrow)
            part.sinks = call.sinks?.sliced(queries, axis: 0)
            if case .array(let mask) = call.mask, mask.ndim > 2, mask.dim(-3) > 1 {
                part.mask = .array(mask.sliced(queries, axis: mask.ndim - 3))
            }
            return Reference.attention(part)
        }
        return MLXH2O.joined(outputs, axis: 1)
    }

    /// Whether kernels may change a layer's rows where they lie.
    var canWriteInPlace: Bool { writesInPlace ?? Self.deviceWritesInPlace }
}
