import CMLXH2O
import Foundation
import MLX

/// The kernels for GPUs, which prove themselves on the device where they run.
///
/// The first time in a process that a variant is used it runs on a small case beside the definition. One
/// that fails or differs is not used: MLX's own operations do its work, and the log says so once.
/// `MLX_H2O_VERIFY` in the environment may be `once` or `never`.
public enum H2OKernels {
    /// Whether a variant is used here.
    public struct Verdict: Sendable, Equatable, Codable {
        /// Which, in words.
        public let variant: String
        /// Whether it is used.
        public let usable: Bool
        /// Why not, or where it differs most from the definition.
        public let why: String
        /// The largest error, in units of what is tolerated; nil where it is beyond all.
        public let error: Double?
        /// The time of the check, compiling included.
        public let seconds: Double
    }

    /// Every verdict of this process, in order.
    public static var verdicts: [Verdict] {
        var text = mlx_string_new()
        defer { mlx_string_free(text) }
        guard mlx_h2o_verdicts(&text) == 0 else { return [] }
        let json = Data(String(cString: mlx_string_data(text)).utf8)
        return (try? JSONDecoder().decode([Verdict].self, from: json)) ?? []
    }

    /// Variants that are not used here.
    public static var refused: [Verdict] { verdicts.filter { !$0.usable } }

    /// Done once: notices go to the log.
    static let areSetUp: Void = {
        mlx_h2o_set_notice(
            { _, message in
                H2ONotice(subject: .kernels, message: String(cString: message!)).log()
            }, nil)
    }()
}
