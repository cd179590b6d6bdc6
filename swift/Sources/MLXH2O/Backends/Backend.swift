import MLX

/// What computes an attention: the kernels of metal/ where there is Metal, else plain MLX ops, which
/// say what is right.
enum Backend: Sendable {
    case plain
    case metal(MetalKernels)

    /// Within `withValue`, what computes on every device.
    @TaskLocal static var chosen: Backend?

    /// That of the default device.
    static var current: Backend { chosen ?? ofDefaultDevice }

    private static var ofDefaultDevice: Backend {
        // swift/Linux stands in for Apple's packages, with a GPU that its tests provide.
        #if (canImport(Metal) && (os(macOS) || os(iOS) || os(visionOS))) || STAND_INS
            if Device.defaultDevice().deviceType == .gpu { return .metal(ofDevice) }
        #endif
        return .plain
    }

    #if (canImport(Metal) && (os(macOS) || os(iOS) || os(visionOS))) || STAND_INS
        private static let ofDevice = MetalKernels(architecture: GPU.deviceInfo().architecture)
    #endif

    /// The kernels, if they compute.
    var metal: MetalKernels? {
        if case .metal(let metal) = self { metal } else { nil }
    }

    /// Softmax attention `[B, Hq, L, Dv]`.
    func attention(_ call: AttentionCall) -> MLXArray {
        if case .joined = call.keys { return joinedAttention(call) }
        return metal?.attention(call) ?? Reference.attention(call)
    }

    /// Attention and the mass `[B, Hk, N]` that each key received.
    func attentionWithMass(
        _ call: AttentionCall
    ) -> (output: MLXArray, mass: MLXArray, logSumExp: MLXArray) {
        if case .joined = call.keys { return joinedWithMass(call) }
        return metal?.attentionWithMass(call) ?? Reference.attentionWithMass(call)
    }

    /// Attention, its logits `[B, Hq, L, N]` and their log-sum-exp `[B, Hq, L]`.
    func attentionWithScores(
        _ call: AttentionCall
    ) -> (output: MLXArray, scores: MLXArray, logSumExp: MLXArray) {
        if case .joined = call.keys { return joinedWithScores(call) }
        return metal?.attentionWithScores(call) ?? Reference.attentionWithScores(call)
    }
}
