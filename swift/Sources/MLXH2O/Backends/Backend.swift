import MLX

/// Who computes an attention: the kernels of metal/ where there is Metal, else plain MLX ops, which
/// say what is right.
enum Backend {
    case plain
    /// On a GPU of this architecture ("applegpu_g13s").
    case metal(architecture: String)

    /// That of the default device.
    static var current: Backend {
        #if canImport(Metal) && (os(macOS) || os(iOS) || os(visionOS))
            if Device.defaultDevice().deviceType == .gpu {
                return .metal(architecture: architecture)
            }
        #endif
        return .plain
    }

    #if canImport(Metal) && (os(macOS) || os(iOS) || os(visionOS))
        private static let architecture = GPU.deviceInfo().architecture
    #endif

    /// Softmax attention `[B, Hq, L, Dv]`.
    func attention(_ call: AttentionOperands) -> MLXArray {
        if case .joined = call.keys { return joinedWithMass(call).output }
        // Over plain rows MLX's own attention is the best there is.
        if call.seed != nil, let launch = launch(call) { return launch.run().output }
        return Reference.attention(call)
    }

    /// Attention and the mass `[B, Hk, N]` that each key received.
    func attentionWithMass(
        _ call: AttentionOperands
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        if case .joined = call.keys { return joinedWithMass(call) }
        guard let launch = launch(call) else { return Reference.attentionWithMass(call) }
        let (output, scores, lse) = launch.run()
        let heads = call.keys.shape[1]
        return (output, Reference.attentionMass(scores, logSumExp: lse, heads: heads), lse)
    }

    /// Attention, its logits `[B, Hq, L, N]` and their log-sum-exp `[B, Hq, L]`.
    func attentionWithScores(
        _ call: AttentionOperands
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        if case .joined(let keys) = call.keys, case .joined(let values) = call.values {
            return joinedWithScores(call, keys, values)
        }
        return launch(call)?.run() ?? Reference.attentionWithScores(call)
    }

    private func launch(_ call: AttentionOperands) -> AttentionLaunch? {
        guard case .metal(let architecture) = self, AttentionLaunch.supports(call) else {
            return nil
        }
        return AttentionLaunch(call, architecture: architecture)
    }
}
