import MLXH2OChecks
import SwiftUI

/// What this device says of the kernels, to be copied into a report: whether each is right here, and how
/// long it takes.
struct DeviceView: View {
    @State private var report = ""
    @State private var isChecking = false

    var body: some View {
        VStack(alignment: .leading, spacing: 12) {
            HStack {
                Button("Check this device", action: check).disabled(isChecking)
                if isChecking { ProgressView() }
                Spacer()
                if !report.isEmpty { ShareLink(item: report) }
            }
            ScrollView {
                Text(report)
                    .font(.caption2.monospaced())
                    .textSelection(.enabled)
                    .frame(maxWidth: .infinity, alignment: .leading)
            }
        }
        .padding()
    }

    private func check() {
        isChecking = true
        Task {
            report = await Task.detached(priority: .userInitiated) {
                do {
                    let report = try DeviceReport()
                    print(report.json)
                    return report.json
                } catch {
                    return error.localizedDescription
                }
            }.value
            isChecking = false
        }
    }
}
