import CMLXH2O
import MLX

/// A policy of this library in the engine's terms.
final class EnginePolicy {
    let handle: mlx_h2o_policy

    /// - Throws: ``H2OError/configuration(_:)`` for a policy that the engine does not have.
    init(_ policy: any Policy) throws {
        guard Self.isKnown(policy) else {
            throw H2OError.configuration(
                "The engine has no policy \"\(type(of: policy).name)\": it is not of this library.")
        }
        var made = mlx_h2o_policy_new()
        try checkEngine(mlx_h2o_policy_named(&made, type(of: policy).name))
        handle = made
        for (name, value) in policy.settings.sorted(by: { $0.key < $1.key }) {
            try checkEngine(mlx_h2o_policy_set(made, name, Self.text(value)))
        }
    }

    deinit { mlx_h2o_policy_free(handle) }

    /// By type and not by name: an app may register another policy under a name of ours.
    static func isKnown(_ policy: any Policy) -> Bool {
        switch policy {
        case is Policies.Distinct, is Policies.EMA, is Policies.EMALogits, is Policies.H2O,
            is Policies.KeyDiff, is Policies.Salient, is Policies.Streaming, is Policies.TOVA:
            true
        default: false
        }
    }

    /// As on the command line: a number with a point is a share, one without a count.
    private static func text(_ value: SettingValue) -> String {
        switch value {
        case .string(let text): text
        case .double(let number): "\(number)"
        default: value.text
        }
    }
}

extension CacheSettings {
    /// Calls with these settings as the engine's options, which hold what they point to only meanwhile.
    ///
    /// - Parameter heads: KV heads.
    /// - Throws: ``H2OError/configuration(_:)`` for saturations of another number of heads.
    func withEngineOptions<Result>(
        heads: Int, _ body: (mlx_h2o_cache_options) throws -> Result
    ) throws -> Result {
        guard saturation.count == 1 || saturation.count == heads else {
            throw H2OError.configuration(
                "saturation has \(saturation.count) numbers for \(heads) KV heads: give one for "
                    + "each, or one for all.")
        }
        var options = mlx_h2o_cache_options_default()
        (options.remainder, options.attending) = (remainderAnswers, attends)
        options.k_bits = Int32(packing.keyBits ?? 0)
        options.v_bits = Int32(packing.valueBits ?? 0)
        options.group_size = Int32(packing.groupSize)
        options.recent_bits = Int32(packing.recentBits ?? 0)
        options.undo = Int32(clamping: undo)
        let frame = frame.map { FrameArrays($0) }
        if let frame {
            (options.frame_centre, options.frame_scale) = (frame.centre.ctx, frame.scale.ctx)
        }
        let saturations =
            saturation.count == heads
            ? saturation : Array(repeating: saturation[0], count: heads)
        let stages = SlotPlan(budgets: [], later: filling).laterNumbers
        options.n_stages = filling.count
        return try withExtendedLifetime(frame) {
            try saturations.withUnsafeBufferPointer { saturations in
                try stages.withUnsafeBufferPointer { stages in
                    options.saturation = saturations.baseAddress
                    options.filling = stages.isEmpty ? nil : stages.baseAddress
                    return try body(options)
                }
            }
        }
    }
}
