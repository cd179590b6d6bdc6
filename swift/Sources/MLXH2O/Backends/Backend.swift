import MLX

/// Who computes an attention: the kernels of metal/ where there is Metal, else plain MLX ops, which
/// say what is right.
protocol Backend {
    func attention(_ call: AttentionOperands) -> MLXArray
    func attentionWithMass(
        _ call: AttentionOperands
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray)
    func attentionWithScores(
        _ call: AttentionOperands
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray)
}

/// Plain MLX ops, on any device.
struct ReferenceBackend: Backend {
    func attention(_ call: AttentionOperands) -> MLXArray { Reference.attention(call) }

    func attentionWithMass(
        _ call: AttentionOperands
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        Reference.attentionWithMass(call)
    }

    func attentionWithScores(
        _ call: AttentionOperands
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        Reference.attentionWithScores(call)
    }
}

enum Backends {
    /// Whose functions compute on the default device.
    static var current: any Backend { ReferenceBackend() }
}
